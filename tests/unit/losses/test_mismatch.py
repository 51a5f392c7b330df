"""Divergences between trainer and engine, rejection by k2 and k3, and batch-normalised weights,
against loops over sequences."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
import torch

from slime_like.losses.mismatch import with_ess
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import REJECTION_METRICS, OffPolicyConfig
from slime_like.metrics.typed import MetricAccumulator

LENGTHS = (7, 1, 12, 5, 3, 9)


def batch(seed: int, spread: float = 0.4) -> tuple[list[list[float]], list[list[float]], Any]:
    """(trainer's log-probs, engine's, whether active) of six sequences, one of them without an
    active token."""
    generator = torch.Generator().manual_seed(seed)
    rollout = [(-torch.rand(n, generator=generator).double() * 3).tolist() for n in LENGTHS]
    noise = [(torch.randn(n, generator=generator).double() * spread).tolist() for n in LENGTHS]
    old = [[m + e for m, e in zip(ms, es)] for ms, es in zip(rollout, noise)]
    mask = [(torch.rand(n, generator=generator) > 0.25).tolist() for n in LENGTHS]
    mask[1], mask[4] = [True], [False] * 3
    return old, rollout, mask


def correct(config: OffPolicyConfig, data: Any, which: range = range(6)) -> Correction:
    flat = [torch.tensor([v for i in which for v in part[i]]) for part in data]
    lengths = torch.tensor([LENGTHS[i] for i in which])
    return off_policy_correction(
        config,
        old_log_probs=torch.tensor([v for i in which for v in data[0][i]], dtype=torch.float64),
        rollout_log_probs=torch.tensor([v for i in which for v in data[1][i]], dtype=torch.float64),
        loss_mask=flat[2],
        seq_ids=torch.repeat_interleave(torch.arange(len(which)), lengths),
        num_seqs=len(which),
    )


def active(data: Any) -> list[list[tuple[float, float]]]:
    """(o, m) of the active tokens, by sequence that has any."""
    found = [[(o, m) for o, m, a in zip(*part) if a] for part in zip(*data)]
    return [pairs for pairs in found if pairs]


def reduced(*corrections: Correction) -> dict[str, float]:
    accumulator = MetricAccumulator()
    for correction in corrections:
        accumulator.add(correction.metrics)
    return with_ess(accumulator.reduce())


@pytest.mark.parametrize("spread", [0.4, 1e-5])
@pytest.mark.parametrize("seed", range(3))
def test_divergences_by_loop(seed: int, spread: float) -> None:
    data = batch(seed, spread)
    sequences = active(data)
    d = [o - m for pairs in sequences for o, m in pairs]
    x = [math.exp(v) for v in d]
    products = [math.prod(math.exp(o - m) for o, m in pairs) for pairs in sequences]
    training = [-fmean(o for o, _ in pairs) for pairs in sequences]
    rollout = [-fmean(m for _, m in pairs) for pairs in sequences]
    expected = {
        "rollout_kl": -fmean(d),
        "rollout_k3_kl": fmean(math.expm1(v) - v for v in d),
        "chi2_token": fmean(v * v for v in x) - 1,
        "chi2_seq": fmean(p * p for p in products) - 1,
        "is_ess": fmean(x) ** 2 / fmean(v * v for v in x),
        "training_log_ppl": fmean(training),
        "rollout_log_ppl": fmean(rollout),
        "training_ppl": fmean(map(math.exp, training)),
        "rollout_ppl": fmean(map(math.exp, rollout)),
        "log_ppl_diff": fmean(t - r for t, r in zip(training, rollout)),
        "log_ppl_abs_diff": fmean(abs(t - r) for t, r in zip(training, rollout)),
        "ppl_ratio": fmean(math.exp(t - r) for t, r in zip(training, rollout)),
    }
    metrics = reduced(correct(OffPolicyConfig(), data))
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-14), name
    assert not any(name.endswith("less_1") for name in metrics)


def test_parts_of_a_step_give_the_metrics_of_the_step() -> None:
    data = batch(5)
    full = reduced(correct(OffPolicyConfig(), data))
    parts = reduced(*(correct(OffPolicyConfig(), data, r) for r in (range(2), range(2, 6))))
    assert parts == pytest.approx(full, rel=1e-6)


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    data = batch(1, spread=2.0)
    correction = correct(
        OffPolicyConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.5), data
    )
    w = [min(math.exp(o - m), 1.5) for pairs in active(data) for o, m in pairs]
    metrics = reduced(correction)
    assert metrics["tis_ess"] == pytest.approx(fmean(w) ** 2 / fmean(v * v for v in w))
    assert metrics["is_ess"] < metrics["tis_ess"] < 1
    alike = (data[0], data[0], data[2])
    assert reduced(correct(OffPolicyConfig(), alike))["is_ess"] == 1


@pytest.mark.parametrize("metric", REJECTION_METRICS)
@pytest.mark.parametrize("seed", range(2))
def test_rejection_by_loop(metric: str, seed: int) -> None:
    data = batch(seed)
    level, _, kind = metric.rpartition("_")
    over = {"seq_mean": fmean, "seq_sum": sum, "seq_max": max}
    threshold = {"token": 0.05, "seq_mean": 0.08, "seq_sum": 0.4, "seq_max": 0.3}[level]
    expected: list[bool] = []
    for o, m, mask in zip(*data):
        d = [a - b for a, b in zip(o, m)]
        k = [v * v / 2 if kind == "k2" else math.exp(v) - 1 - v for v in d]
        judged = [v for v, a in zip(k, mask) if a]
        if level == "token":
            expected += [not a or v <= threshold for v, a in zip(k, mask)]
        else:
            fits = not judged or over[level](judged) <= threshold
            expected += [not a or fits for a in mask]
    correction = correct(
        OffPolicyConfig(rejection_metric=metric, rejection_threshold=threshold), data
    )
    assert correction.keep_mask is not None
    assert correction.keep_mask.tolist() == expected
    rejected = len(expected) - sum(expected)
    tokens = sum(map(len, active(data)))
    assert 0 < rejected < tokens, "the case shows both"
    assert reduced(correction)["rejection_masked_ratio"] == pytest.approx(rejected / tokens)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("metric", [None, "token_k3"])
def test_normalised_weights_average_1_over_what_is_left(level: str, metric: str | None) -> None:
    data = batch(3)
    threshold = None if metric is None else 0.05
    settings = dict(tis_ratio_type=level, rejection_metric=metric, rejection_threshold=threshold)
    plain = correct(OffPolicyConfig(**settings), data)
    normal = correct(OffPolicyConfig(**settings, tis_batch_normalize=True), data)
    assert plain.keep_mask is not None and normal.keep_mask is not None
    assert torch.equal(plain.keep_mask, normal.keep_mask)
    assert plain.importance_weights is not None and normal.importance_weights is not None
    mask = torch.tensor([a for part in data[2] for a in part])
    left = plain.keep_mask & mask
    before, after = plain.importance_weights, normal.importance_weights
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    if level == "token":
        mean = before[left].mean()
        assert float(after[left].mean()) == pytest.approx(1)
    else:
        first = [before[left & (ids == i)][0] for i in range(6) if (left & (ids == i)).any()]
        mean = torch.stack(first).mean()
    torch.testing.assert_close(after[left], before[left] / mean)
    assert (after[~left] == 1).all()
    assert reduced(normal)["tis_batch_norm_factor"] == pytest.approx(float(mean))


def test_nothing_left_is_normalised_by_nothing() -> None:
    config = OffPolicyConfig(
        tis_ratio_type="token",
        tis_batch_normalize=True,
        rejection_metric="token_k2",
        rejection_threshold=1e-12,
    )
    correction = correct(config, batch(0))
    assert correction.importance_weights is not None and correction.keep_mask is not None
    assert (correction.importance_weights == 1).all()
    assert reduced(correction)["tis_batch_norm_factor"] == 1


@pytest.mark.parametrize(
    "settings", [{"rejection_metric": "token_k2"}, {"rejection_threshold": 0.1}]
)
def test_metric_and_threshold_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rejection_\w+=.* has no effect without --rejection-"):
        correct(OffPolicyConfig(**settings), batch(0))
