"""Advantages that are normalised already, w = 1, against token weights: equal where the loss is
homogeneous, warned about elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.losses import (
    LOSS_REDUCTIONS,
    LossTerms,
    compute_policy_loss,
    policy_losses,
    prescale_advantages,
    token_weights,
)
from tests.unit.losses.test_total import TERMS, config_of, is_refused, random_step

HOMOGENEOUS = [
    name for name, loss in policy_losses.items() if loss.homogeneous and "advantages" in loss.needs
]
OTHERS = [name for name, loss in policy_losses.items() if not loss.homogeneous]
OF_SAMPLES: dict[str, dict[str, Any]] = {
    "rollout_mean": {"rollout_ids": torch.tensor([0, 0, 1, 2, 3, 3, 4])},
    "prompt_mean": {"prompt_ids": torch.tensor([0, 0, 0, 1, 1, 2, 2])},
    "seq_mean_token_sum_norm": {"loss_norm_length": 40},
    "token_mean_legacy": {"micro_batch_size": 7},
}


def loss_and_gradient(
    name: str, step: dict[str, Tensor], u: Tensor, terms: LossTerms, **changes: Any
) -> tuple[float, Tensor, Any]:
    """changes: fields that replace those of the step, or join them."""
    tensors: dict[str, Any] = {**step, **changes}
    leaf = tensors.pop("log_probs").clone().requires_grad_()
    output = compute_policy_loss(
        name, leaf, tensors.pop("loss_mask"), u, config=config_of(name), terms=terms, **tensors
    )
    return output.loss.item(), torch.autograd.grad(output.loss, leaf)[0], output.metrics


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_scaled_advantages_are_token_weights_where_the_loss_is_homogeneous(
    name: str, reduction: str
) -> None:
    """Loss, gradient, and the KL and entropy in them, off-policy and with a correction."""
    if is_refused(name, reduction):
        pytest.skip("the loss is not defined for it")
    step = random_step(4)
    keep = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) < 0.8
    scaled = prescale_advantages(
        reduction, step["advantages"], step["loss_mask"], **OF_SAMPLES.get(reduction, {})
    )
    u = token_weights(reduction, step["loss_mask"], **OF_SAMPLES.get(reduction, {}))
    assert torch.equal(scaled.loss_weights, u)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for correction in ({}, {"keep_mask": keep}):
            raw = loss_and_gradient(name, step, u, TERMS, **correction)
            by_caller = loss_and_gradient(
                name, step, scaled.loss_weights, TERMS, **scaled.tensors, **correction
            )
            assert by_caller[0] == pytest.approx(raw[0], rel=1e-12)
            torch.testing.assert_close(by_caller[1], raw[1], rtol=1e-12, atol=1e-15)
            for term in ("policy_loss", "kl_loss", "entropy_loss"):
                assert float(by_caller[2][term].value) == pytest.approx(
                    float(raw[2][term].value), rel=1e-12
                ), term
    assert raw[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_it_is_another_loss_and_says_so(name: str) -> None:
    step = random_step(4)
    step["advantages"] = 3 * step["advantages"]  # so that clip_cov has candidates
    scaled = prescale_advantages("token_mean", step["advantages"], step["loss_mask"])
    raw = loss_and_gradient(name, step, scaled.loss_weights, LossTerms())
    with pytest.warns(
        UserWarning, match=f"policy loss {name} with advantages that are already normalised"
    ):
        by_caller = loss_and_gradient(
            name, step, scaled.loss_weights, LossTerms(), **scaled.tensors
        )
    assert float((by_caller[1] - raw[1]).norm()) > 0.02 * float(raw[1].norm())


def test_what_the_difference_is() -> None:
    """SkyRL's clip_cov becomes ppo: no scaled covariance reaches the threshold. kl_cov's penalty is
    summed, not averaged."""
    step = random_step(4)
    step["advantages"] = 3 * step["advantages"]
    active = int(step["loss_mask"].sum())
    scaled = prescale_advantages("token_mean", step["advantages"], step["loss_mask"])
    u = scaled.loss_weights
    with pytest.warns(UserWarning, match="already normalised"):
        clip_cov = loss_and_gradient("clip_cov", step, u, LossTerms(), **scaled.tensors)
    with pytest.warns(UserWarning, match="already normalised"):
        kl_cov = loss_and_gradient("kl_cov", step, u, LossTerms(), **scaled.tensors)
    assert float(loss_and_gradient("clip_cov", step, u, LossTerms())[2]["clip_cov_frac"].value) >= 1
    assert float(clip_cov[2]["clip_cov_frac"].value) == 0
    torch.testing.assert_close(
        clip_cov[1], loss_and_gradient("ppo", step, u, LossTerms())[1], rtol=1e-12, atol=1e-15
    )
    plain = loss_and_gradient("importance_sampling", step, u, LossTerms())[1]
    penalty = (kl_cov[1] - plain).abs()
    assert float(penalty.max()) == pytest.approx(1.0), (
        "kl_cov_coef itself, where the loss divides it by the tokens of the step"
    )
    raw = (loss_and_gradient("kl_cov", step, u, LossTerms())[1] - plain).abs()
    assert float(raw.max()) == pytest.approx(1 / active)


def test_kl_and_entropy_do_not_grow_with_the_batch() -> None:
    """Twice the same step: with the weights of the double one the gradient of each copy is half, KL
    and entropy included."""
    step = random_step(5)
    double = {key: torch.cat([x, x]) for key, x in step.items()}
    one = prescale_advantages("sequence_mean", step["advantages"], step["loss_mask"])
    two = prescale_advantages("sequence_mean", double["advantages"], double["loss_mask"])
    single = loss_and_gradient("ppo", step, one.loss_weights, TERMS, **one.tensors)
    both = loss_and_gradient("ppo", double, two.loss_weights, TERMS, **two.tensors)
    assert both[0] == pytest.approx(single[0], rel=1e-12)
    torch.testing.assert_close(both[1][:7], single[1] / 2)


def test_masked_advantages_may_hold_anything() -> None:
    mask = torch.tensor([[True, False]])
    scaled = prescale_advantages("token_mean", torch.tensor([[2.0, float("nan")]]), mask)
    assert scaled.advantages.tolist() == [[2.0, 0.0]] and scaled.advantages.dtype == torch.float32


def test_packed_advantages() -> None:
    step = random_step(6)
    seq_ids = torch.arange(7).repeat_interleave(9)
    padded = prescale_advantages("sequence_mean", step["advantages"], step["loss_mask"])
    packed = prescale_advantages(
        "sequence_mean", step["advantages"].flatten(), step["loss_mask"].flatten(), seq_ids=seq_ids
    )
    assert torch.equal(packed.advantages, padded.advantages.flatten())


@pytest.mark.parametrize(
    ("reduction", "shape", "message"),
    [
        ("token_sum", (2, 3), "unknown loss reduction"),
        ("prompt_mean", (2, 3), "needs prompt_ids"),
        ("seq_mean_token_sum_norm", (2, 3), "--loss-norm-length"),
        ("token_mean_legacy", (2, 3), "micro-batch size"),
        ("token_mean", (2, 4), "they must be equal"),
        ("token_mean", (3,), "they must be equal"),
    ],
)
def test_what_is_wrong_is_named(reduction: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prescale_advantages(reduction, torch.ones(shape), torch.ones(2, 3, dtype=torch.bool))
