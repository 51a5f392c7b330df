"""Numbers about a rollout: rewards, lengths, how it ended, and how far trainer and sampler are
apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.errors import RunError
from slime_like.metrics.typed import MetricAccumulator, masked_max, masked_mean
from slime_like.sample_index import AnySample
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus

TRUNCATED_FRACTION = "rollout/truncated_frac"
# share of the trained tokens that no weights of the run are known to have written
UNKNOWN_VERSIONS = "rollout/unknown_version_frac"


def is_failed(sample: AnySample) -> bool:
    """No response, or no finite reward."""
    lost = sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED)
    return lost or sample.reward is None or not math.isfinite(sample.reward)


def failed_fraction(samples: Sequence[AnySample]) -> float:
    """Share of samples without a response or a valid reward."""
    return sum(map(is_failed, samples)) / len(samples)


def first_failure(samples: Sequence[AnySample]) -> str:
    """A message about the first failed sample, on all ranks from the one that has it; a
    collective."""
    sample = next(s for s in samples if is_failed(s))
    texts = gather(_failure(sample) if isinstance(sample, Sample) else None)
    return next(words for words in texts if words is not None)


def _failure(sample: Sample) -> str:
    if sample.status == SampleStatus.ABORTED:
        return f"sample {sample.sample_id}: the engine gave it up" + (
            f": {why}" if (why := sample.metadata.get("failure")) else ""
        )
    return f"sample {sample.sample_id}: {sample.metadata.get('failure', f'its reward is {sample.reward}')}"


def truncated_fraction(samples: Sequence[AnySample]) -> float:
    """Share of samples that reached the limit of length."""
    return sum(s.status == SampleStatus.TRUNCATED for s in samples) / len(samples)


def engine_troubles(metrics: Mapping[str, float]) -> str:
    """What became of requests to servers, for the end of a message; nothing where all went well."""
    counts = [
        f"{name.removeprefix('engine/')} {value:g}"
        for name, value in metrics.items()
        if name.startswith("engine/") and value
    ]
    return f" (requests to the engines: {', '.join(counts)})" if counts else ""


def rollout_metrics(
    samples: Sequence[AnySample], weight_version: int | None = None
) -> dict[str, float]:
    """Over all samples of a rollout; rewards that are not finite are left out of mean and
    deviation, and counted. weight_version: of the policy that is about to be trained, from which
    staleness counts."""
    rewards = [s.reward for s in samples if s.reward is not None and math.isfinite(s.reward)]
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.float64)
    metrics = {
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        TRUNCATED_FRACTION: truncated_fraction(samples),
        "rollout/failed_frac": failed_fraction(samples),
        "rollout/reward_nonfinite": float(len(samples) - len(rewards)),
        "rollout/tokens": float(sum(s.total_length for s in samples)),
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
    """How many weight versions the tokens that were sampled are behind the policy that trains on
    them: mean, largest, and the share of each. counts: tokens by versions behind."""
    total = sum(counts.values())
    metrics = {
        "rollout/staleness_mean": sum(behind * n for behind, n in counts.items()) / total,
        "rollout/staleness_max": float(max(counts)),
    }
    return metrics | {
        f"rollout/staleness_frac_{behind}": count / total
        for behind, count in sorted(counts.items())
    }


def check_staleness(
    samples: Sequence[AnySample], weight_version: int, bound: int | None, remedy: str
) -> None:
    """Raises RunError for tokens of a version that no policy has had yet, and for older ones than
    `bound` versions behind `weight_version`, the policy that is about to be trained; None: no
    bound."""
    for sample in samples:
        versions = sample.version_counts
        newest, oldest = (
            max(versions, default=weight_version),
            min(versions, default=weight_version),
        )
        if newest > weight_version or (bound is not None and weight_version - oldest > bound):
            wrong = newest if newest > weight_version else oldest
            legal = "no bound" if bound is None else f"at most {bound} versions behind"
            raise RunError(
                f"sample {sample.sample_id} has tokens of weight version {wrong}, and the policy that is "
                f"trained has version {weight_version} ({legal}): {remedy}"
            )


def fresh_tokens(sample: Sample, weight_version: int) -> Tensor:
    """[R] bool: tokens that these weights sampled; all of them where it is not known."""
    if not sample.weight_versions:
        return torch.ones(sample.response_length, dtype=torch.bool)
    return torch.tensor(sample.weight_versions) == weight_version


def stale_tokens(sample: Sample, weight_version: int) -> Tensor:
    """[R] bool: tokens that other weights of this run sampled. A user's rollout function may bring
    tokens of foreign weights, NOT_SAMPLED; they are nobody's to compare."""
    if not sample.weight_versions:
        return torch.zeros(sample.response_length, dtype=torch.bool)
    versions = torch.tensor(sample.weight_versions)
    return (versions != weight_version) & (versions != NOT_SAMPLED)


def train_rollout_difference(
    old: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor], group: object
) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampler's, over the active tokens of all
    data-parallel ranks.

    old, rollout: [R] each, by sample; masks: [R] bool. group: data-parallel process group, or None.
    The probability-ratio error is mean(exp |o - m|), 1 where they agree. p99 is the largest over
    the ranks' own 99th percentiles.
    """
    difference = torch.cat([(o - m).abs() for o, m in zip(old, rollout)])
    mask = torch.cat(list(masks))
    active = difference[mask]
    p99 = (
        active.kthvalue(math.ceil(0.99 * active.numel())).values
        if active.numel()
        else torch.zeros(())
    )
    accumulator = MetricAccumulator()
    accumulator.add(
        {
            "rollout/train_rollout_log_prob_diff_mean": masked_mean(difference, mask),
            "rollout/train_rollout_log_prob_diff_max": masked_max(difference, mask),
            "rollout/train_rollout_log_prob_diff_p99": masked_max(
                p99.reshape(1), torch.ones(1, dtype=torch.bool)
            ),
            "rollout/token_ratio_error": masked_mean(difference.exp(), mask),
            "rollout/log_probs_nonfinite": masked_mean((~torch.isfinite(difference)).float(), mask),
        }
    )
    return accumulator.reduce(group)  # type: ignore[arg-type]
