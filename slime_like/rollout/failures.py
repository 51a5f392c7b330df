"""Failed samples: those without a usable response or reward. The samples of groups that were graded
and then left out (dropped by the dynamic filter, surplus) count as well: a filter must not hide a
broken reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from slime_like.distributed.collectives import gather
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.samples.index import AnySample
from slime_like.types import Sample, SampleStatus

logger = logging.getLogger(__name__)

# metrics of a collection: graded samples that are not trained on, and how many of them failed
LEFT_OUT = "rollout/left_out_samples"
LEFT_OUT_FAILED = "rollout/left_out_failed_samples"


def is_failed(sample: AnySample) -> bool:
    """Whether the sample has no response or no finite reward."""
    if sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED) or sample.reward is None:
        return True
    return not math.isfinite(sample.reward)


def num_failed(samples: Sequence[AnySample]) -> int:
    """Number of samples without a response or a finite reward."""
    return sum(map(is_failed, samples))


def failed_fraction(
    samples: Sequence[AnySample], collected: Mapping[str, float] | None = None
) -> float:
    """Fraction of samples without a response or a finite reward. collected: metrics of their
    collection, with the samples that it left out."""
    collected = collected or {}
    failed = num_failed(samples) + collected.get(LEFT_OUT_FAILED, 0.0)
    return failed / (len(samples) + collected.get(LEFT_OUT, 0.0))


def first_failure(samples: Sequence[AnySample], group: dist.ProcessGroup | None = None) -> str:
    """A message about the first failed sample, broadcast from the rank that holds it. Collective.
    group: see `gather`."""
    sample = next(s for s in samples if is_failed(s))
    text = describe_failure(sample) if isinstance(sample, Sample) else None
    return next(text for text in gather(text, group) if text is not None)


def describe_failure(sample: Sample) -> str:
    """Why the sample failed."""
    if sample.status == SampleStatus.ABORTED:
        reason = str(sample.metadata.get("failure") or "")
        if reason.startswith("--"):  # of the function or program that this flag names
            return f"sample {sample.sample_id}: {reason}"
        suffix = f": {reason}" if reason else ""
        return f"sample {sample.sample_id}: aborted by the engine{suffix}"
    return (
        f"sample {sample.sample_id}: "
        f"{sample.metadata.get('failure', f'its reward is {sample.reward}')}"
    )


def check_failed(
    rollout_id: int, fraction: float, max_failed: float, reason: Callable[[], str]
) -> None:
    """Warn about failed samples, or stop the run.

    Args:
        rollout_id: From 0.
        fraction: Of the samples that failed.
        max_failed: --max-failed-samples.
        reason: Returns the first failure, with more about it if the run stops.

    Raises:
        RunError: The fraction is above the limit.
    """
    if not fraction:
        return
    text = (
        f"rollout {rollout_id + 1}: {fraction:.1%} of the samples have no usable response or reward"
    )
    if fraction > max_failed:
        raise RunError(
            f"{text}, more than --max-failed-samples {max_failed:g}; the first: {reason()}"
        )
    warn_rank_0(logger, f"{text}; the first: {reason()}")


def warn_failed(
    samples: Sequence[AnySample], what: str, effect: str, group: dist.ProcessGroup | None = None
) -> None:
    """Warn about failed samples that are not trained on, with the first reason. Collective. group:
    see `gather`."""
    if failed := num_failed(samples):
        warn_rank_0(
            logger,
            f"{what}: {failed} of {len(samples)} samples have no usable response or reward and "
            f"{effect}; the first: {first_failure(samples, group)}",
        )
