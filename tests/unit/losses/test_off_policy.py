"""The off-policy correction against a float64 loop over sequences, written from section 5 of the
specification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slime_like.losses import LossInputs, LossTerms, policy_losses, total_loss
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.metrics.typed import MetricAccumulator

NAN, INF = math.nan, math.inf
LENGTHS = (7, 1, 12, 5, 3, 9)


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def by_loop(
    config: OffPolicyConfig, o: list[float], m: list[float], mask: list[bool]
) -> tuple[list[bool], list[float]]:
    """Keep mask and weights of one sequence (M2PO left out)."""
    active = [t for t in range(len(o)) if mask[t]]
    d = {t: o[t] - m[t] for t in active}
    x = {t: math.exp(clamp(d[t], -20, 20)) if math.isfinite(d[t]) else NAN for t in active}
    alive = all(math.isfinite(v) for v in d.values())
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    for t in active:
        if (high is not None and not x[t] <= high) or (low is not None and not x[t] >= low):
            alive = False
    kept = {t: alive for t in active}
    if (
        config.token_mask_is_threshold_low is not None
        and config.token_mask_is_threshold_high is not None
    ):
        for t in active:
            kept[t] = (
                kept[t]
                and config.token_mask_is_threshold_low
                <= x[t]
                <= config.token_mask_is_threshold_high
            )
    left = [t for t in active if kept[t]]
    total = sum(d[t] for t in left)
    c = dict.fromkeys(left, 1.0)
    for t in left:
        if config.tis_ratio_type == "token":
            c[t] = clamp(x[t], config.token_tis_ratio_clip_low, config.token_tis_ratio_clip_high)
        elif config.tis_ratio_type == "sequence":
            c[t] = min(math.exp(clamp(total, -20, 20)), config.sequence_tis_ratio_clip_high)
    if config.sequence_mask_metric is not None and left:
        if config.sequence_mask_metric == "geometric":
            inside = (
                config.geo_mask_low
                <= math.exp(clamp(total / len(left), -20, 20))
                <= config.geo_mask_high
            )
        else:
            inside = (
                config.product_mask_low
                <= math.exp(clamp(total, -20, 20))
                <= config.product_mask_high
            )
        kept = {t: kept[t] and inside for t in active}
    return [kept.get(t, True) for t in range(len(o))], [
        c[t] if kept.get(t) else 1.0 for t in range(len(o))
    ]


def batch(seed: int, spread: float = 0.5) -> dict[str, torch.Tensor]:
    """Six sequences, one fully masked, with values at masked places that must not be seen."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    m = -torch.rand(total, generator=generator, dtype=torch.float64) * 5
    scale = torch.repeat_interleave(
        torch.tensor([1.0, 0.3, 0.01, 3.0, 0.1, 1.0], dtype=torch.float64), torch.tensor(LENGTHS)
    )
    o = m + torch.randn(total, generator=generator, dtype=torch.float64) * spread * scale
    seq_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (torch.rand(total, generator=generator) > 0.25) & (seq_ids != 4)
    mask[7] = True  # the sequence of one token
    o[~mask] = torch.tensor([NAN, INF, -INF, 50.0], dtype=torch.float64).repeat(total)[
        : int((~mask).sum())
    ]
    return {"old_log_probs": o, "rollout_log_probs": m, "loss_mask": mask, "seq_ids": seq_ids}


def correct(config: OffPolicyConfig, data: dict[str, torch.Tensor]) -> Correction:
    tensors: dict[str, Any] = data
    return off_policy_correction(config, num_seqs=int(data["seq_ids"].max()) + 1, **tensors)


def values(correction: Correction) -> dict[str, float]:
    accumulator = MetricAccumulator()
    accumulator.add(correction.metrics)
    return accumulator.reduce()


CONFIGS: list[dict[str, Any]] = [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1, "token_tis_ratio_clip_low": 0.9},
    {"tis_ratio_type": "sequence"},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.01},
    {"sequence_mask_metric": "geometric"},
    {"sequence_mask_metric": "product"},
    {"sequence_mask_metric": "product", "product_mask_low": 0.99, "product_mask_high": 1.3},
    {"outlier_token_is_threshold_high": 2.0},
    {"outlier_token_is_threshold_low": 0.5},
    {
        "outlier_token_is_threshold_low": 0.1,
        "outlier_token_is_threshold_high": 3.0,
        "tis_ratio_type": "sequence",
    },
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2},
    {
        "token_mask_is_threshold_low": 0.8,
        "token_mask_is_threshold_high": 1.2,
        "tis_ratio_type": "sequence",
        "sequence_mask_metric": "product",
    },
    {
        "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.5,
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.9,
        "geo_mask_high": 1.1,
        "outlier_token_is_threshold_high": 8.0,
    },
]


@pytest.mark.parametrize("settings", CONFIGS, ids=lambda s: "-".join(s))
@pytest.mark.parametrize("seed", range(4))
def test_masks_and_weights_are_the_loop(settings: dict[str, Any], seed: int) -> None:
    config, data = OffPolicyConfig(**settings), batch(seed)
    data["old_log_probs"][9] = data["rollout_log_probs"][9] + (
        50.0 if seed == 1 else -50.0
    )  # beyond the clamp
    data["loss_mask"][9] = True
    if seed == 2:
        data["rollout_log_probs"][28] = -INF
        data["loss_mask"][28] = True
    result = correct(config, data)
    keep, weights = [], []
    for i in range(len(LENGTHS)):
        rows = data["seq_ids"] == i
        one = by_loop(
            config,
            *(
                data[name][rows].tolist()
                for name in ("old_log_probs", "rollout_log_probs", "loss_mask")
            ),
        )
        keep += one[0]
        weights += one[1]
    active = data["loss_mask"]
    assert result.keep_mask is not None and not result.keep_mask.requires_grad
    assert result.keep_mask[active].tolist() == torch.tensor(keep)[active].tolist()
    if config.tis_ratio_type is None:
        assert result.importance_weights is None
    else:
        assert result.importance_weights is not None
        assert result.importance_weights.tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("settings", CONFIGS, ids=lambda s: "-".join(s))
def test_a_broken_token_drops_its_sequence_and_no_other(
    settings: dict[str, Any], bad: float
) -> None:
    data = batch(5, spread=0.0)  # the policies agree: nothing else is dropped
    data["rollout_log_probs"][3] = bad
    data["loss_mask"][3] = True
    result = correct(OffPolicyConfig(**settings), data)
    assert result.keep_mask is not None
    dropped = (~result.keep_mask & data["loss_mask"]).nonzero().squeeze(1)
    assert dropped.tolist() == [t for t in range(7) if data["loss_mask"][t]]
    assert result.importance_weights is None or result.importance_weights.isfinite().all()
    reported = values(result)
    assert reported["rollout_logprobs_nonfinite"] == 1
    assert all(math.isfinite(v) for v in reported.values())
    assert reported["is_ratio_mean"] == 1 and reported["is_ratio_std"] == 0


def test_agreement_changes_nothing() -> None:
    data = batch(0)
    data["old_log_probs"] = data["rollout_log_probs"].clone()
    for settings in CONFIGS:
        result = correct(OffPolicyConfig(**settings), data)
        assert result.keep_mask is not None and result.keep_mask.all()
        assert result.importance_weights is None or (result.importance_weights == 1).all()


def test_bounds_are_inclusive() -> None:
    """x = 2 and x = 0.5 exactly, at the bounds and just outside."""
    data = {
        "old_log_probs": torch.tensor([2.0, 0.5], dtype=torch.float64).log(),
        "rollout_log_probs": torch.zeros(2, dtype=torch.float64),
        "loss_mask": torch.ones(2, dtype=torch.bool),
        "seq_ids": torch.arange(2),
    }
    high, low = data["old_log_probs"].exp().tolist()
    for token in (True, False):
        names = ("token_mask_is_threshold", "") if token else ("product_mask", "product")
        extra: dict[str, Any] = {} if token else {"sequence_mask_metric": names[1]}
        for shift, expected in ((1.0, [True, True]), (1 - 1e-9, [False, True])):
            config = OffPolicyConfig(
                **{f"{names[0]}_low": low, f"{names[0]}_high": high * shift}, **extra
            )
            result = correct(config, data)
            assert result.keep_mask is not None and result.keep_mask.tolist() == expected
        config = OffPolicyConfig(
            **{f"{names[0]}_low": low * (1 + 1e-9), f"{names[0]}_high": high}, **extra
        )
        result = correct(config, data)
        assert result.keep_mask is not None and result.keep_mask.tolist() == [True, False]
    config = OffPolicyConfig(
        outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high
    )
    result = correct(config, data)
    assert result.keep_mask is not None and result.keep_mask.all()


def test_icepop_is_a_token_mask_and_a_token_weight() -> None:
    """x where low <= x <= high, else nothing."""
    data = batch(7, spread=1.0)
    config = OffPolicyConfig(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=2.0,
        token_tis_ratio_clip_low=0.5,
        token_mask_is_threshold_low=0.5,
        token_mask_is_threshold_high=2.0,
    )
    result = correct(config, data)
    assert result.keep_mask is not None and result.importance_weights is not None
    active = data["loss_mask"]
    x = (data["old_log_probs"] - data["rollout_log_probs"])[active].exp()
    expected = torch.where((x >= 0.5) & (x <= 2.0), x, 0.0)
    got = torch.where(result.keep_mask, result.importance_weights, 0.0)[active]
    torch.testing.assert_close(got, expected)


def test_metrics_by_loop() -> None:
    data = batch(3)
    config = OffPolicyConfig(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=1.2,
        token_tis_ratio_clip_low=0.9,
        outlier_token_is_threshold_high=2.5,
        outlier_token_is_threshold_low=0.3,
        token_mask_is_threshold_low=0.6,
        token_mask_is_threshold_high=1.6,
        sequence_mask_metric="geometric",
        geo_mask_low=0.95,
        geo_mask_high=1.05,
    )
    reported = values(correct(config, data))
    active = data["loss_mask"]
    d = (data["old_log_probs"] - data["rollout_log_probs"])[active]
    ids = data["seq_ids"][active]
    x = d.exp()
    expected = {
        "is_ratio_mean": x.mean(),
        "is_ratio_std": x.std(correction=0),
        "is_ratio_max": x.max(),
        "is_ratio_min": x.min(),
        "rollout_train_logprobs_abs_diff_mean": d.abs().mean(),
        "rollout_train_logprobs_abs_diff_std": d.abs().std(correction=0),
        "rollout_train_logprobs_abs_diff_max": d.abs().max(),
        "rollout_train_logprobs_abs_diff_min": d.abs().min(),
        "tis": x.mean(),
        "tis_abs": (x - 1).abs().mean(),
        "train_rollout_logprob_abs_diff": d.abs().mean(),
        "tis_clipfrac": ((x > 1.2) | (x < 0.9)).double().mean(),
        "tis_token_clip_high_ratio": (x > 1.2).double().mean(),
        "token_mask_ratio": ((x > 1.6) | (x < 0.6)).double().mean(),
        "rollout_logprobs_nonfinite": torch.tensor(0.0),
    }
    sequences = ids.unique().tolist()
    assert sequences == [0, 1, 2, 3, 5], "the masked sequence counts nowhere"
    over = [bool((x[ids == i] > 2.5).any()) for i in sequences]
    under = [bool((x[ids == i] < 0.3).any()) for i in sequences]
    expected["outlier_seq_over_high_ratio"] = torch.tensor(over).double().mean()
    expected["outlier_seq_under_low_ratio"] = torch.tensor(under).double().mean()
    expected["outlier_seq_masked_ratio"] = (
        (torch.tensor(over) | torch.tensor(under)).double().mean()
    )
    high, low = [], []
    for i, outlier in zip(sequences, [a or b for a, b in zip(over, under)]):
        left = (ids == i) & (x >= 0.6) & (x <= 1.6)
        judged = not outlier and bool(left.any())
        mean = float(d[left].mean().exp()) if judged else 1.0
        high.append(mean > 1.05)
        low.append(mean < 0.95)
    expected["geo_sequence_mask_over_high_ratio"] = torch.tensor(high).double().mean()
    expected["geo_sequence_mask_under_low_ratio"] = torch.tensor(low).double().mean()
    expected["geo_sequence_mask_masked_ratio"] = (
        torch.tensor([a or b for a, b in zip(high, low)]).double().mean()
    )
    of_bounds = {name: reported[name] for name in expected}  # the others: test_mismatch.py
    assert of_bounds == pytest.approx({name: float(v) for name, v in expected.items()}, rel=1e-5)
    assert 0 < reported["outlier_seq_masked_ratio"] < 1 and 0 < reported["token_mask_ratio"] < 1


def test_mismatch_is_measured_without_any_correction() -> None:
    result = correct(OffPolicyConfig(), batch(0))
    assert result.keep_mask is None and result.importance_weights is None
    assert values(result)["is_ratio_std"] > 0
    assert not OffPolicyConfig().enabled


@pytest.mark.parametrize("settings", CONFIGS, ids=lambda s: "-".join(s))
def test_every_key_switches_the_correction_on(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if not name.endswith(("clip_high", "clip_low")) and not name.startswith(
            ("geo_", "product_")
        ):
            assert OffPolicyConfig(**{name: value}).enabled


def test_one_side_of_the_token_mask_alone_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"token_mask_is_threshold_high=2\.0 has no effect without --token-mask-is-threshold-low",
    ):
        correct(OffPolicyConfig(token_mask_is_threshold_high=2.0), batch(0))


def m2po_by_loop(squares: Sequence[float], threshold: float) -> float:
    """Drops from the top until the mean of the rest fits; the largest square that stays."""
    rest = sorted(squares)
    while len(set(rest)) > 1 and sum(rest) / len(rest) > threshold:
        largest = rest[-1]
        rest = [s for s in rest if s != largest]
    return rest[-1]


@pytest.mark.parametrize("threshold", [1e-9, 0.005, 0.04, 0.3, 100.0])
def test_m2po(threshold: float) -> None:
    data = batch(11)
    result = correct(OffPolicyConfig(m2po_threshold=threshold), data)
    assert result.keep_mask is not None
    active = data["loss_mask"]
    squares = (data["old_log_probs"] - data["rollout_log_probs"])[active].square()
    limit = m2po_by_loop(squares.tolist(), threshold)
    assert result.keep_mask[active].tolist() == (squares <= limit).tolist()
    assert result.keep_mask[active].any()
    assert result.keep_mask[~active].all()
    assert values(result)["m2po_mask_ratio"] == pytest.approx(
        float((squares > limit).double().mean())
    )


def test_m2po_on_nothing_keeps_nothing() -> None:
    data = batch(0)
    data["loss_mask"][:] = False
    assert correct(OffPolicyConfig(m2po_threshold=0.1), data).metrics["m2po_mask_ratio"].value == 0


@pytest.mark.parametrize("settings", CONFIGS, ids=lambda s: "-".join(s))
def test_sequences_do_not_see_each_other(settings: dict[str, Any]) -> None:
    """The same numbers, whether the sequences come together or one by one."""
    config, data = OffPolicyConfig(**settings), batch(2)
    together = correct(config, data)
    accumulator = MetricAccumulator()
    for i in range(len(LENGTHS)):
        rows = data["seq_ids"] == i
        alone = correct(
            config,
            {
                **{name: t[rows] for name, t in data.items()},
                "seq_ids": torch.zeros(LENGTHS[i], dtype=torch.int64),
            },
        )
        accumulator.add(alone.metrics)
        assert together.keep_mask is not None and alone.keep_mask is not None
        assert torch.equal(together.keep_mask[rows], alone.keep_mask)
        if together.importance_weights is not None and alone.importance_weights is not None:
            torch.testing.assert_close(together.importance_weights[rows], alone.importance_weights)
    assert accumulator.reduce() == pytest.approx(values(together), rel=1e-5)


def test_the_loss_is_weighted_and_its_denominator_stays() -> None:
    """The gradient of a kept token is its on-policy one times c; that of a rejected one is 0;
    nothing is inflated."""
    data = batch(1)
    config = OffPolicyConfig(
        tis_ratio_type="token", token_mask_is_threshold_low=0.7, token_mask_is_threshold_high=1.4
    )
    result = correct(config, data)
    mask, count = data["loss_mask"], data["loss_mask"].numel()
    log_probs = torch.where(mask, data["old_log_probs"], -1.0).requires_grad_()
    advantages = torch.linspace(-1, 2, count, dtype=torch.float64)
    weights = torch.full((count,), 1 / int(mask.sum()), dtype=torch.float64)
    inputs = LossInputs(
        log_probs,
        mask,
        weights,
        data["seq_ids"],
        len(LENGTHS),
        advantages=advantages,
        old_log_probs=log_probs.detach(),
        keep_mask=result.keep_mask,
        importance_weights=result.importance_weights,
    )
    ppo = policy_losses.get("ppo")
    total_loss(inputs, ppo, ppo.config_type(), LossTerms()).loss.backward()
    assert (
        result.keep_mask is not None
        and result.importance_weights is not None
        and log_probs.grad is not None
    )
    expected = torch.where(
        mask & result.keep_mask, -advantages * weights * result.importance_weights, 0.0
    )
    torch.testing.assert_close(log_probs.grad, expected)
