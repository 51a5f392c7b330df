"""Metrics of a rollout's samples, their failures and their staleness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from slime_like.errors import RunError
from slime_like.metrics.names import TRUNCATED_FRACTION
from slime_like.rollout.failures import failed_fraction
from slime_like.samples.episodes import truncated_fraction
from slime_like.samples.index import AnySample


def merge_metrics(metrics: dict[str, float], user_metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the metrics of a user function. Raises ValueError for a name that is taken."""
    duplicates = sorted(metrics.keys() & user_metrics.keys())
    if duplicates:
        raise ValueError(
            f"--rollout-function-path: the metric {duplicates[0]!r} is one of the run's own; give "
            "it another name"
        )
    return {**metrics, **user_metrics}


def engine_failures(metrics: Mapping[str, float]) -> str:
    """Counts of failed requests to servers, to append to a message; "" if there were none."""
    counts = [
        f"{name.removeprefix('engine/')} {value:g}"
        for name, value in metrics.items()
        if name.startswith("engine/") and value
    ]
    return f" (requests to the engines: {', '.join(counts)})" if counts else ""


def rollout_metrics(
    samples: Sequence[AnySample],
    weight_version: int | None = None,
    *,
    sequences: Sequence[AnySample] | None = None,
) -> dict[str, float]:
    """Metrics over all samples of a rollout. Non-finite rewards are excluded from mean and standard
    deviation, and counted.

    Args:
        weight_version: Version of the policy before the update, the reference of staleness.
        sequences: The samples with their branches (`with_branches`), whose tokens and lengths count
            as well; None: no sample has any.
    """
    sequences = samples if sequences is None else sequences
    rewards = [s.reward for s in samples if s.reward is not None and math.isfinite(s.reward)]
    lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.float64)
    metrics = {
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        TRUNCATED_FRACTION: truncated_fraction(sequences),
        "rollout/failed_frac": failed_fraction(samples),
        "rollout/reward_nonfinite": float(len(samples) - len(rewards)),
        "rollout/tokens": float(sum(s.total_length for s in sequences)),
    }
    if rewards:
        values = torch.tensor(rewards, dtype=torch.float64)
        metrics["rollout/reward_mean"] = float(values.mean())
        metrics["rollout/reward_std"] = float(values.std(correction=0))
    versions = Counter[int]()
    for sample in samples:
        versions.update(sample.version_counts)
    if versions:
        metrics["rollout/weight_version_min"] = float(min(versions))
        if weight_version is not None:
            metrics |= staleness_metrics({weight_version - v: n for v, n in versions.items()})
    return metrics


def staleness_metrics(counts: Mapping[int, int]) -> dict[str, float]:
    """Staleness of the sampled tokens in weight versions: mean, maximum, and the fraction at each
    value. counts: number of tokens by staleness."""
    total = sum(counts.values())
    metrics = {
        "rollout/staleness_mean": sum(behind * n for behind, n in counts.items()) / total,
        "rollout/staleness_max": float(max(counts)),
    }
    for behind, count in sorted(counts.items()):
        metrics[f"rollout/staleness_frac_{behind}"] = count / total
    return metrics


def check_staleness(
    samples: Sequence[AnySample], weight_version: int, bound: int | None, remedy: str
) -> None:
    """Raise RunError for tokens of a future version, or of one too far behind.

    Args:
        weight_version: Version of the policy before the update.
        bound: Maximum number of versions behind; None: unbounded.
        remedy: End of the message.
    """
    for sample in samples:
        versions = sample.version_counts
        newest = max(versions, default=weight_version)
        oldest = min(versions, default=weight_version)
        if newest > weight_version or (bound is not None and weight_version - oldest > bound):
            wrong = newest if newest > weight_version else oldest
            legal = "no bound" if bound is None else f"at most {bound} versions behind"
            raise RunError(
                f"sample {sample.sample_id} has tokens of weight version {wrong}, and the policy "
                f"being trained has version {weight_version} ({legal}): {remedy}"
            )
