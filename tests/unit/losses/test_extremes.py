"""Every loss and variant at ratio 1, near it (gradcheck), and far from it: log-ratios of +-50,
masks with nothing or one token in them, NaN and infinities where nothing may look. The lists are
the registry's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.losses import (
    LOSS_REDUCTIONS,
    LossOutput,
    LossTerms,
    compute_off_policy_correction,
    compute_policy_loss,
    policy_losses,
    token_weights,
)
from tests.unit.losses.loss_cases import with_needed
from tests.unit.losses.test_invariance import CORRECTIONS, VARIANTS, WITHOUT_AN_OLD_POLICY, legal
from tests.unit.losses.test_prescaling import OF_SAMPLES
from tests.unit.losses.test_total import is_refused

POLICY_GRADIENTS = [
    v
    for v, (name, _) in VARIANTS.items()
    if v not in WITHOUT_AN_OLD_POLICY and policy_losses.get(name).policy_gradient
]
# Their weight is a constant for autograd (and in gspo-token the value is the sequence's): the
# gradient is not the derivative of the value.
WITH_A_STOPPED_WEIGHT = {
    "cispo",
    "cispo_rollout",
    "rollout_is",
    "topr",
    "vespo",
    "gspo_wide",
    "gspo_turn",
    "luspo_wide",
    "sapo_sequence",
    "sapo_turn",
    "up",
    "up_plain",
}


def loss_of(
    variant: str,
    log_probs: Tensor,
    mask: Tensor,
    u: Tensor,
    terms: LossTerms | None = None,
    **tensors: Any,
) -> LossOutput:
    name, settings = VARIANTS[variant]
    config = policy_losses.get(name).config_type(**settings)
    return compute_policy_loss(name, log_probs, mask, u, config=config, terms=terms, **tensors)


def tensors_at(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Old policy, sampler and reference alike, `log_ratio` below the current policy."""
    old = (log_probs - log_ratio).detach()
    rewards = torch.where(advantages[:, :1] > 0, 1.0, -1.0).expand(advantages.shape)
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": old,
        "ref_log_probs": old,
        "advantages": advantages,
        "rewards": rewards,
    }
    return with_needed(tensors, old)


# --- ratio 1 ---


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
@pytest.mark.parametrize("variant", POLICY_GRADIENTS)
def test_on_policy_the_gradient_is_the_policy_gradient(variant: str, reduction: str) -> None:
    """-u A at every active token: for gmpo if the advantage is constant in a sequence, for clip_cov
    at tokens that are not selected, for luspo times the length."""
    if is_refused(VARIANTS[variant][0], reduction):
        pytest.skip("the loss is not defined for it")
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(7, 1, generator=g, dtype=torch.float64) + (
        0.0 if variant == "gmpo" else torch.randn(7, 9, generator=g, dtype=torch.float64)
    )
    advantages = advantages.expand(7, 9)
    mask = torch.rand(7, 9, generator=g) < 0.7
    leaf = (-0.1 - torch.rand(7, 9, generator=g, dtype=torch.float64)).requires_grad_()
    u = token_weights(reduction, mask, **OF_SAMPLES.get(reduction, {}))
    output = loss_of(variant, leaf, mask, u, **tensors_at(leaf, torch.zeros(7, 9), advantages))
    expected = torch.where(mask, -u * advantages, 0.0)
    if VARIANTS[variant][0] == "luspo":
        expected = expected * mask.sum(1, keepdim=True)
    found = torch.autograd.grad(output.loss, leaf)[0]
    if VARIANTS[variant][0] == "clip_cov":
        chosen = (found == 0) & (expected != 0)
        assert int(chosen.sum()) == round(float(output.metrics["clip_cov_frac"].value))
        assert bool(chosen.any()) == (variant == "clip_cov_often")
        expected = torch.where(chosen, 0.0, expected)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-16)


# --- near it ---


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v not in ("gspo", "luspo")]
)  # their default range is narrower than these ratios
def test_gradients_are_derivatives_where_the_loss_is_smooth(variant: str) -> None:
    """Between kinks: log-ratios of 0.02 to 0.12, clip ranges beyond. And those with a stopped
    weight are known."""
    g = torch.Generator().manual_seed(2)
    log_ratio = (0.02 + 0.1 * torch.rand(2, 4, generator=g, dtype=torch.float64)) * torch.tensor(
        [[1, -1, 1, -1], [-1, 1, 1, 1]]
    )
    leaf = (-0.3 - torch.rand(2, 4, generator=g, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[True, True, False, True], [True, True, True, False]])
    advantages = torch.tensor(
        [[1.0, 2.0, 9.0, 0.5], [-0.5, -1.5, -0.5, 9.0]], dtype=torch.float64
    )  # gspo's is one if A is constant
    tensors = tensors_at(leaf, log_ratio, advantages)

    def loss(log_probs: Tensor) -> Tensor:
        return loss_of(
            variant,
            log_probs,
            mask,
            mask.double() / 3,
            LossTerms(kl_loss_coef=0.3, kl_loss_type="k3"),
            **tensors,
        ).loss

    assert torch.autograd.gradcheck(loss, (leaf,), raise_exception=False) == (
        variant not in WITH_A_STOPPED_WEIGHT
    )


# --- far from it ---

WILD = [50.0, -50.0, 0.0, 0.3, -0.3, 25.0, -25.0, 1.0, -2.0]


def wild_step(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs [7, 9], mask and constants: every log-ratio of WILD with both signs of the
    advantage, to the old policy, the sampler and the reference; a fully masked row, rows of one
    token at +50 and at -50, a sampler's -inf and NaN at active tokens, and anything at masked ones.
    """
    log_ratio = torch.tensor([WILD] * 7, dtype=dtype)
    log_ratio[1:3] = log_ratio[1:3].flip(1)
    leaf = torch.full((7, 9), -0.5, dtype=dtype).requires_grad_()
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[0, 3:5], mask[2] = False, False
    mask[3], mask[4] = torch.arange(9) == 0, torch.arange(9) == 1
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0], dtype=dtype)[:, None].expand(
        7, 9
    )
    tensors = tensors_at(leaf, log_ratio, advantages)
    tensors["rollout_log_probs"] = tensors["old_log_probs"] - log_ratio.roll(2, 1)
    tensors["nll_weights"] = torch.full((7, 9), 0.02, dtype=dtype)
    return leaf, mask, tensors


def each_poison() -> Iterator[Any]:
    """Of each case one, in turn, is quick."""
    poisons = [float("nan"), float("inf"), float("-inf")]
    cases = [(v, c) for v in VARIANTS for c in CORRECTIONS if legal(v, c)]
    for number, case in enumerate(cases):
        for place, poison in enumerate(poisons):
            quick = number % len(poisons) == place
            yield pytest.param(*case, poison, marks=() if quick else pytest.mark.extended)


@pytest.mark.parametrize(("variant", "correction", "poison"), each_poison())
def test_far_off_policy_everything_stays_finite(
    variant: str, correction: str, poison: float
) -> None:
    """In fp32 and fp64, with every correction; a masked token gets exactly no gradient whatever
    stands there, and changes nothing."""
    _, config, of_terms = CORRECTIONS[correction]
    terms = LossTerms(kl_loss_coef=0.1, entropy_coef=0.01, positive_nll_coef=0.1, **of_terms)
    for dtype in (torch.float32, torch.float64):
        leaf, mask, tensors = wild_step(dtype)
        entropy = torch.ones(7, 9, dtype=dtype)
        u = token_weights("sequence_mean", mask).to(dtype)
        results = []
        for spoilt in (False, True):
            given = {
                name: torch.where(mask, x, poison) if spoilt else x for name, x in tensors.items()
            }
            if config.enabled:  # what the sampler did not report is dropped by any correction
                given["rollout_log_probs"] = given["rollout_log_probs"].clone()
                given["rollout_log_probs"][6, 0] = poison
            more = compute_off_policy_correction(
                config, given["old_log_probs"], given["rollout_log_probs"], mask
            ).tensors
            if config.enabled and VARIANTS[variant][0] in ("rollout_is", "dppo", "ipo", "cispo"):
                # the loss reads it too, and the sequence is out
                given["rollout_log_probs"][6, 0] = 0.0
            weights = torch.where(mask, u, poison) if spoilt else u
            output = loss_of(
                variant,
                leaf,
                mask,
                weights,
                terms,
                entropy=torch.where(mask, entropy, poison),
                **given,
                **more,
            )
            (gradient,) = torch.autograd.grad(output.loss, leaf)
            assert torch.isfinite(output.loss) and torch.isfinite(gradient).all()
            assert (gradient[~mask] == 0).all()
            for name, metric in output.metrics.items():
                assert torch.isfinite(metric.value) or metric.kind in ("min", "max"), name
            results.append((output.loss, gradient))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(
            results[0][1], results[1][1]
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("active", [0, 1])
def test_a_batch_of_one_token_or_none(variant: str, active: int) -> None:
    leaf = torch.tensor([[-0.5, -0.7]], requires_grad=True)
    mask = torch.tensor([[active == 1, False]])
    tensors = tensors_at(leaf, torch.tensor([[0.01, 0.02]]), torch.ones(1, 2))
    output = loss_of(variant, leaf, mask, token_weights("token_mean", mask).float(), **tensors)
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    assert gradient[0, 1] == 0 and torch.isfinite(gradient).all()
    assert (output.loss.item() != 0) == (active == 1)
