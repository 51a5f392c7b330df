"""Random masks, shapes and settings: a finite loss and gradient, or a ValueError; never NaN without
a word."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.advantages import advantage_estimators, compute_advantages, discounted_returns, gae
from slime_like.advantages.registry import OutcomeEstimator
from slime_like.losses import (
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    LossTerms,
    OffPolicyConfig,
    compute_off_policy_correction,
    compute_policy_loss,
    policy_losses,
    token_weights,
)
from tests.unit.losses.loss_cases import with_needed

NUMBERS = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-30, 1e30, None, "token", True]),
    st.floats(0.01, 4.0),
)
OUTCOME_ESTIMATORS = [n for n, e in advantage_estimators.items() if isinstance(e, OutcomeEstimator)]


@st.composite
def settings_of(draw: st.DrawFn, config_type: type) -> dict[str, Any]:
    """Some fields of a settings class, legal or not."""
    chosen = {}
    for field in dataclasses.fields(config_type):
        if draw(st.integers(0, 3)):
            continue
        choices = field.metadata.get("choices")
        values = st.sampled_from([*choices, "bogus"]) if choices else NUMBERS
        chosen[field.name] = draw(values)
    return chosen


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss mask [B, T], tensors [B, T] with anything at inactive tokens)."""
    shape = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    scale = draw(st.sampled_from([0.1, 5.0, 100.0]))
    tensors = {
        name: scale * torch.randn(shape, generator=generator)
        for name in ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "rewards")
    }  # fmt: skip
    tensors = with_needed(tensors, torch.empty(shape))
    tensors = {n: torch.where(mask, t, draw(st.sampled_from([0.0, math.nan, math.inf]))) for n, t in tensors.items()}  # fmt: skip
    return mask, tensors


@given(st.data())
def test_a_loss_is_finite_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(policy_losses.names(with_aliases=True)))
    loss = policy_losses.get(name)
    mask, tensors = data.draw(batches())
    if data.draw(st.booleans()) and mask.any():  # one broken number at an active token
        broken = data.draw(st.sampled_from([n for n in tensors if n != "rollout_log_probs"]))
        tensors[broken][tuple(mask.nonzero()[0].tolist())] = math.nan
    leaf = torch.where(mask, -torch.ones(mask.shape), math.nan).requires_grad_()
    reduction = data.draw(st.sampled_from(LOSS_REDUCTIONS))
    ids: dict[str, Any] = {
        "prompt_ids": torch.arange(len(mask)),
        "loss_norm_length": 5,
        "micro_batch_size": 1,
    }
    u = token_weights(reduction, mask, **ids)
    try:
        config = loss.config_type(**data.draw(settings_of(loss.config_type)))
        terms = LossTerms(**data.draw(settings_of(LossTerms)))
        output = compute_policy_loss(name, leaf, mask, u, config=config, terms=terms, **tensors)
    except ValueError:
        return
    assert not output.loss.isnan()
    assert all(not metric.value.isnan() for metric in output.metrics.values())
    output.loss.backward()
    assert leaf.grad is not None
    assert not leaf.grad.isnan().any()
    assert (leaf.grad[~mask] == 0).all()


@given(st.data())
def test_a_correction_is_sound_or_refused(data: st.DataObject) -> None:
    mask, tensors = data.draw(batches())
    rollout = tensors["rollout_log_probs"].clone()
    if mask.any() and data.draw(st.booleans()):
        rollout[tuple(mask.nonzero()[0].tolist())] = math.nan
    try:
        config = OffPolicyConfig(**data.draw(settings_of(OffPolicyConfig)))
        correction = compute_off_policy_correction(config, tensors["old_log_probs"], rollout, mask)
    except ValueError:
        return
    weights, keep = correction.importance_weights, correction.keep_mask
    assert weights is None or (torch.isfinite(weights) & (weights >= 0)).all()
    if keep is not None:
        assert keep[mask & ~torch.isfinite(rollout)].sum() == 0
    assert all(not metric.value.isnan() for metric in correction.metrics.values())


@given(st.data())
def test_advantages_are_finite_or_refused(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 6))
    rewards = torch.tensor([data.draw(st.sampled_from([0.0, 1.0, -2.5, 1e6, math.nan, math.inf])) for _ in range(count)])  # fmt: skip
    size = data.draw(st.sampled_from([count, count, count, count + 1]))
    groups = torch.tensor([data.draw(st.integers(0, 2)) for _ in range(size)], dtype=torch.long)
    lengths = torch.tensor([data.draw(st.integers(-1, 3)) for _ in range(count)], dtype=torch.long)
    singleton: Any = data.draw(st.sampled_from(["zero", "reward", "bogus"]))
    estimator = data.draw(st.sampled_from(OUTCOME_ESTIMATORS))
    try:
        output = compute_advantages(
            estimator, rewards=rewards, group_ids=groups, lengths=lengths, singleton=singleton
        )
    except ValueError:
        return
    assert torch.isfinite(output.values).all()
    assert (output.values[~torch.isfinite(rewards)] == 0).all()


@given(st.data())
def test_returns_read_active_tokens_alone(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 6))
    flags = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    mask = torch.tensor(flags, dtype=torch.bool)
    gamma, lambd = (data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(2))
    values = torch.where(mask, torch.linspace(-1, 1, length), math.nan)
    rewards = torch.where(mask, torch.linspace(2, -1, length), math.nan)
    for result in (*gae([rewards], [values], [mask], gamma, lambd), discounted_returns([rewards], [mask], gamma)):  # fmt: skip
        assert torch.isfinite(result[0]).all() and (result[0][~mask] == 0).all()


@given(st.sampled_from(KL_ESTIMATORS), st.booleans(), batches())
def test_kl_has_no_nan(kind: str, unbiased: bool, batch: Any) -> None:
    mask, tensors = batch
    leaf = torch.where(mask, -torch.ones(mask.shape), 0.0).requires_grad_()
    output = compute_policy_loss(
        "gpg", leaf, mask, mask.float(),
        terms=LossTerms(kl_loss_coef=0.5, kl_loss_type=kind, use_unbiased_kl=unbiased), **tensors,
    )  # fmt: skip
    output.loss.backward()
    assert leaf.grad is not None and not leaf.grad.isnan().any()
