"""The one assembly of the loss: identity, corrections, masking, and independence of how the step is
cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.losses import (
    LOSS_REDUCTIONS,
    LossInputs,
    LossTerms,
    PolicyLoss,
    PolicyLossOutput,
    compute_policy_loss,
    policy_losses,
    reduction_weights,
    total_loss,
)
from slime_like.metrics.typed import MetricAccumulator
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES, with_needed

NAMES = OF_SINGLE_RESPONSES
TERMS = LossTerms(kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.07)
# Losses that choose tokens within a micro-batch: see test_covariance.py.
CHOOSE_IN_A_MICRO_BATCH = ("clip_cov", "kl_cov")
# A token without a finite old log-prob spoils the ratio of its sequence, which the correction drops
# as a whole.
SEQUENCE_RATIO = ("gspo", "luspo", "vespo")


def config_of(name: str) -> Any:
    """Settings of a loss; the one without a default has a value, a small penalty a larger one."""
    settings = {"dro": {"dro_beta": 0.1}, "ipo": {"ipo_kl_coef": 0.1}}
    return policy_losses.get(name).config_type(**settings.get(name, {}))


def random_step(seed: int = 0) -> dict[str, Tensor]:
    """Padded [B, T] float64 tensors of a step: a fully masked row, one of a single token, tool
    spans, off-policy tokens."""
    g = torch.Generator().manual_seed(seed)
    shape = (7, 9)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    mask = torch.rand(shape, generator=g) < 0.7
    mask[2] = False
    mask[3] = torch.arange(9) == 4
    old = -normal(1).abs() - 0.1
    tensors = {
        "log_probs": old + normal(0.4),
        "loss_mask": mask,
        "advantages": normal(1),
        "old_log_probs": old,
        "ref_log_probs": old + normal(0.3),
        "entropy": normal(1).abs(),
        "rollout_log_probs": old + normal(0.1),
        "rewards": torch.tensor([1.0, 0.0, 1.0, -1.0, 0.5, 0.0, 1.0], dtype=torch.float64)[:, None]
        .expand(shape)
        .clone(),
    }
    return with_needed(tensors, old)


def weights_of(reduction: str, mask: Tensor) -> Tensor:
    u = reduction_weights(
        reduction,
        active_tokens=mask.sum(1),
        rollout_ids=torch.tensor([0, 0, 1, 2, 3, 3, 4]),
        prompt_ids=torch.tensor([0, 0, 0, 1, 1, 2, 2]),
        loss_norm_length=9,
        micro_batch_size=7,
    )
    return u[:, None].expand(mask.shape)


def run(
    name: str,
    step: dict[str, Tensor],
    weights: Tensor,
    rows: list[int],
    width: int,
    terms: LossTerms,
    importance_level: str = "token",
) -> tuple[float, Tensor, Any]:
    """(loss, gradient [len(rows), T], metrics) of one micro-batch of rows padded to `width` with
    NaN."""
    tensors = {}
    for key, x in {**step, "loss_weights": weights}.items():
        padding = torch.zeros(len(rows), width - x.shape[1], dtype=x.dtype)
        tensors[key] = torch.cat(
            [x[rows], padding if x.dtype == torch.bool else padding.fill_(float("nan"))], dim=1
        )
    leaf = tensors.pop("log_probs").requires_grad_()
    mask, u = tensors.pop("loss_mask"), tensors.pop("loss_weights")
    output = compute_policy_loss(
        name,
        leaf,
        mask,
        u,
        terms=terms,
        config=config_of(name),
        importance_level=importance_level,
        **tensors,
    )
    output.loss.backward()
    assert leaf.grad is not None
    return output.loss.item(), leaf.grad[:, : step["log_probs"].shape[1]], output.metrics


def is_refused(name: str, reduction: str) -> bool:
    """Whether `compute_policy_loss` sees weights for which the loss is not defined."""
    one_weight = reduction in ("token_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
    return one_weight and bool(policy_losses.get(name).required_reductions)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in CHOOSE_IN_A_MICRO_BATCH])
def test_loss_and_gradient_do_not_depend_on_the_cut(name: str, reduction: str) -> None:
    """Micro-batches of any size, in any order, with any padding, holding anything: one loss, one
    gradient, one set of metrics."""
    step = random_step()
    weights = weights_of(reduction, step["loss_mask"])
    if is_refused(name, reduction):
        with pytest.raises(ValueError, match="needs loss_weights of sequence_mean or rollout_mean"):
            run(name, step, weights, list(range(7)), 9, TERMS)
        return
    loss, gradient, metrics = run(name, step, weights, list(range(7)), 9, TERMS)
    assert gradient.abs().sum() > 0
    full_one = MetricAccumulator()
    full_one.add(metrics)
    expected = full_one.reduce()
    assert expected["loss"] == pytest.approx(loss, rel=1e-12)
    for parts in (
        [[0], [1], [2], [3], [4], [5], [6]],
        [[6, 2, 0], [4], [5, 3, 1]],
        [[5, 4, 3, 2, 1, 0, 6]],
    ):
        total, pieces, accumulator = 0.0, torch.zeros_like(gradient), MetricAccumulator()
        for i, rows in enumerate(parts):
            value, pieces[rows], metrics = run(name, step, weights, rows, 9 + 3 * i, TERMS)
            total += value
            accumulator.add(metrics)
        assert total == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(pieces, gradient, rtol=1e-12, atol=1e-14)
        assert accumulator.reduce() == pytest.approx(expected, rel=1e-5)


CORRECTIONS = ("masks", "token weights", "sequence weights")


def corrected_step(correction: str) -> dict[str, Any]:
    """A step with a token mask, one wholly rejected sequence, and weights of tokens or of
    sequences."""
    g = torch.Generator().manual_seed(11)
    step: dict[str, Any] = dict(random_step())
    step["keep_mask"] = torch.rand(7, 9, generator=g) < 0.7
    step["keep_mask"][4] = False
    if correction != "masks":
        columns = 1 if correction == "sequence weights" else 9
        step["importance_weights"] = (
            (0.3 + torch.rand(7, columns, generator=g, dtype=torch.float64)).expand(7, 9).clone()
        )
    return step


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in (*CHOOSE_IN_A_MICRO_BATCH, "cross_entropy")]
)
def test_a_corrected_loss_does_not_depend_on_the_cut_either(name: str, correction: str) -> None:
    """With OPSM on; and what is rejected gets no policy gradient. A loss that is anchored on the
    sampler refuses the weights."""
    terms = dataclasses.replace(TERMS, opsm_delta=0.01)
    level = "sequence" if correction == "sequence weights" else "token"
    step = corrected_step(correction)
    weights = weights_of("rollout_mean", step["loss_mask"])
    if correction != "masks" and policy_losses.get(name).correction == "masks":
        with pytest.raises(ValueError, match="takes no importance weights"):
            run(name, step, weights, [0], 9, terms)
        return
    loss, gradient, _ = run(name, step, weights, list(range(7)), 9, terms, importance_level=level)
    for parts in ([[0], [1], [2], [3], [4], [5], [6]], [[6, 2, 0], [4], [5, 3, 1]]):
        total, pieces = 0.0, torch.zeros_like(gradient)
        for i, rows in enumerate(parts):
            value, pieces[rows], _ = run(
                name, step, weights, rows, 9 + 3 * i, terms, importance_level=level
            )
            total += value
        assert total == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(pieces, gradient, rtol=1e-12, atol=1e-14)
    policy_only = run(
        name, step, weights, list(range(7)), 9, LossTerms(opsm_delta=0.01), importance_level=level
    )[1]
    assert not policy_only[~step["keep_mask"]].any()
    assert policy_only.any()


def test_the_identity_term_by_term() -> None:
    """sum mask (w k c loss + u (coef kl - coef H)), as a loop; w and u apart, and their gradients
    too."""
    g = torch.Generator().manual_seed(5)
    step = {name: x.flatten() for name, x in random_step(1).items()}
    count = step["log_probs"].numel()
    keep = torch.rand(count, generator=g) < 0.6
    c, u, w = (torch.rand(count, generator=g, dtype=torch.float64) + 0.1 for _ in range(3))
    leaf, entropy = step.pop("log_probs").requires_grad_(), step.pop("entropy").requires_grad_()
    inputs = LossInputs(
        leaf,
        step.pop("loss_mask"),
        u,
        torch.arange(count) // 9,
        7,
        policy_weights=w,
        entropy=entropy,
        keep_mask=keep,
        importance_weights=c,
        **step,
    )
    loss = policy_losses.get("sapo")
    output = total_loss(inputs, loss, loss.config_type(), TERMS)
    tokens = loss.fn(inputs, loss.config_type()).token_losses
    policy = kl = entropies = torch.zeros((), dtype=torch.float64)
    for t in range(count):
        if inputs.loss_mask[t]:
            delta = leaf[t] - step["ref_log_probs"][t]
            policy = policy + (w[t] * c[t] * tokens[t] if keep[t] else 0.0)
            kl = kl + u[t] * (torch.exp(-delta) - 1 + delta)
            entropies = entropies + u[t] * entropy[t]
    expected = policy + 0.3 * kl - 0.07 * entropies
    for name, x in {
        "loss": expected,
        "policy_loss": policy,
        "kl_loss": kl,
        "entropy_loss": entropies,
    }.items():
        assert output.metrics[name].kind == "sum"
        torch.testing.assert_close(output.metrics[name].value, x.detach())
    actual = torch.autograd.grad(output.loss, (leaf, entropy), retain_graph=True)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (leaf, entropy)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_masked_rows_may_hold_anything(name: str, poison: float) -> None:
    step = random_step(2)
    weights = weights_of("rollout_mean", step["loss_mask"])
    clean = run(name, step, weights, list(range(7)), 9, TERMS)
    spoilt = {
        key: x if x.dtype == torch.bool else torch.where(step["loss_mask"], x, poison)
        for key, x in step.items()
    }
    dirty = run(
        name, spoilt, torch.where(step["loss_mask"], weights, poison), list(range(7)), 9, TERMS
    )
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert (dirty[1][~step["loss_mask"]] == 0).all()
    for metric in dirty[2].values():
        assert torch.isfinite(metric.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_active_tokens_still_has_a_backward(name: str) -> None:
    step = random_step()
    weights = weights_of("token_mean", step["loss_mask"])
    loss, gradient, metrics = run(name, step, weights, [2], 9, TERMS)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros(1, 9, dtype=torch.float64))
    assert metrics.keys() == run(name, step, weights, [0], 9, TERMS)[2].keys()


@pytest.mark.parametrize("name", NAMES)
def test_one_token_and_far_off_policy_tokens_stay_finite(name: str) -> None:
    for log_ratio in (50.0, -50.0, 0.0):
        leaf = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
        for sign in (1.0, -1.0):
            tensors = {
                "advantages": sign,
                "old_log_probs": -1.0,
                "rollout_log_probs": -1.0,
                "rewards": sign,
            }
            output = compute_policy_loss(
                name,
                leaf,
                torch.ones(1, 1),
                torch.ones(1, 1),
                config=config_of(name),
                **with_needed(
                    {key: torch.full((1, 1), x) for key, x in tensors.items()}, leaf.detach()
                ),
            )
            (gradient,) = torch.autograd.grad(output.loss, leaf)
            assert torch.isfinite(output.loss)
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in NAMES
        if policy_losses.get(n).correction == "outer" and n not in CHOOSE_IN_A_MICRO_BATCH
    ],
)
def test_a_rejected_token_loses_its_policy_term_and_keeps_kl_and_entropy(name: str) -> None:
    """Whatever made it rejected: a weight or an old log-prob that is not finite does not reach the
    gradient."""
    step = {key: x[:1] for key, x in random_step(3).items()}
    step["loss_mask"] = torch.ones(1, 9, dtype=torch.bool)
    step["rewards"] = torch.ones(1, 9)
    keep = torch.arange(9)[None] != 4
    c = torch.where(keep, 0.5, float("nan")).double()
    weights = torch.full((1, 9), 0.25, dtype=torch.float64)
    extra = {"keep_mask": keep, "importance_weights": c}
    _, with_terms, metrics = run(name, {**step, **extra}, weights, [0], 9, TERMS)
    for poison in (float("nan"), float("inf"), float("-inf")):
        spoilt = {
            **step,
            **extra,
            "old_log_probs": torch.where(keep, step["old_log_probs"], poison),
        }
        if name in SEQUENCE_RATIO:
            spoilt["keep_mask"] = torch.zeros_like(keep)
        loss, policy_only, _ = run(name, spoilt, weights, [0], 9, LossTerms())
        assert math.isfinite(loss)
        assert policy_only[0, 4] == 0
        assert torch.isfinite(policy_only).all()
    delta = (step["log_probs"] - step["ref_log_probs"])[0, 4]
    assert float(with_terms[0, 4]) == pytest.approx(float(0.25 * 0.3 * (1 - torch.exp(-delta))))
    uncorrected = run(name, step, weights, [0], 9, LossTerms())[1]
    torch.testing.assert_close(
        run(name, {**step, **extra}, weights, [0], 9, LossTerms())[1][keep], 0.5 * uncorrected[keep]
    )
    assert metrics["kl"].count == 9


def test_a_loss_that_corrects_itself_is_not_corrected_again() -> None:
    step = random_step()
    seen = []

    def fn(inputs: LossInputs, config: object) -> PolicyLossOutput:
        seen.append(inputs.importance_weights)
        return PolicyLossOutput(inputs.masked(inputs.log_probs), {})

    loss = PolicyLoss("own", object, fn, frozenset(), correction="internal")
    count = step["log_probs"].numel()
    inputs = LossInputs(
        step["log_probs"].flatten(),
        torch.ones(count, dtype=torch.bool),
        torch.ones(count),
        torch.zeros(count, dtype=torch.long),
        1,
        keep_mask=torch.zeros(count, dtype=torch.bool),
        importance_weights=torch.full((count,), 7.0),
    )
    torch.testing.assert_close(
        total_loss(inputs, loss, None, LossTerms()).loss, step["log_probs"].sum()
    )
    assert float(seen[0].sum()) == 7 * count


def test_correction_of_cross_entropy_is_refused() -> None:
    step = random_step()
    with pytest.raises(ValueError, match="cross_entropy takes no off-policy correction"):
        run(
            "cross_entropy",
            {**step, "keep_mask": step["loss_mask"]},
            torch.ones(7, 9),
            [0],
            9,
            LossTerms(),
        )


@pytest.mark.filterwarnings("ignore:dppo. the batch has no rollout_log_probs")
@pytest.mark.parametrize("name", NAMES)
def test_what_a_loss_needs_is_what_it_asks_for(name: str) -> None:
    step = random_step()
    for missing in ("advantages", "old_log_probs", "rollout_log_probs", "rewards"):
        rest = {key: x for key, x in step.items() if key != missing}
        if missing in policy_losses.get(name).needs:
            with pytest.raises(ValueError, match=f"needs {missing}"):
                run(name, rest, torch.ones(7, 9), [0], 9, LossTerms())
        else:
            run(name, rest, torch.ones(7, 9), [0], 9, LossTerms())


@pytest.mark.parametrize(
    ("terms", "missing"),
    [
        (LossTerms(kl_loss_coef=0.1), "ref_log_probs"),
        (LossTerms(entropy_coef=0.1), "entropy"),
        (LossTerms(use_unbiased_kl=True), "old_log_probs"),
    ],
)
def test_a_term_without_its_tensor_is_refused(terms: LossTerms, missing: str) -> None:
    step = {key: x for key, x in random_step().items() if key != missing}
    with pytest.raises(ValueError, match=missing):
        run("cross_entropy", step, torch.ones(7, 9), [0], 9, terms)


def test_zero_coefficients_report_without_acting() -> None:
    step = random_step()
    weights = weights_of("sequence_mean", step["loss_mask"])
    bare = {key: x for key, x in step.items() if key not in ("ref_log_probs", "entropy")}
    loss, gradient, _ = run("ppo", bare, weights, list(range(7)), 9, LossTerms())
    with_terms = run("ppo", step, weights, list(range(7)), 9, LossTerms())
    assert with_terms[0] == loss
    assert torch.equal(with_terms[1], gradient)
    assert {"kl", "kl_loss", "entropy", "entropy_loss"} <= with_terms[2].keys()


def test_kl_and_entropy_are_not_scaled_by_policy_weights() -> None:
    """Normalised advantages have w = 1; u still normalises the other terms."""
    step = random_step()
    weights = weights_of("token_mean", step["loss_mask"])
    scaled = {
        **step,
        "advantages": step["advantages"] * weights,
        "policy_weights": torch.ones(7, 9, dtype=torch.float64),
    }
    plain, by_caller = (run("ppo", s, weights, list(range(7)), 9, TERMS) for s in (step, scaled))
    assert by_caller[0] == pytest.approx(plain[0], rel=1e-12)
    torch.testing.assert_close(by_caller[1], plain[1])


def test_logged_losses_survive_scaling_in_place() -> None:
    step = random_step()
    leaf, mask = step["log_probs"].requires_grad_(), step["loss_mask"]
    output = compute_policy_loss(
        "ppo",
        leaf,
        mask,
        torch.ones(7, 9),
        advantages=step["advantages"],
        old_log_probs=step["old_log_probs"],
    )
    before = output.metrics["loss"].value.clone()
    with torch.no_grad():
        output.loss.mul_(1000)
    assert torch.equal(output.metrics["loss"].value, before)
    assert torch.equal(output.metrics["policy_loss"].value, before)
    assert not any(metric.value.requires_grad for metric in output.metrics.values())


def test_the_alias_dual_clip_bounds_by_three() -> None:
    """-A r with A = -1, r = e^2 = 7.4 is bounded by 3; ppo itself has no bound."""
    tensors = {"advantages": -torch.ones(1, 1), "old_log_probs": torch.full((1, 1), -3.0)}
    args = torch.full((1, 1), -1.0), torch.ones(1, 1), torch.ones(1, 1)
    assert float(compute_policy_loss("dual_clip", *args, **tensors).loss) == pytest.approx(3.0)
    assert float(compute_policy_loss("vanilla", *args, **tensors).loss) == pytest.approx(7.389056)
    config = dataclasses.replace(policy_losses.get("ppo").config_type(), eps_clip_c=5.0)
    assert float(
        compute_policy_loss("dual_clip", *args, config=config, **tensors).loss
    ) == pytest.approx(5.0)
