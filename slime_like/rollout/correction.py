"""The off-policy correction of a rollout's optimizer steps, before they are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.import_utils import load_function
from slime_like.losses.custom_tis import custom_correction
from slime_like.losses.mismatch import with_ess
from slime_like.losses.off_policy import Correction, OffPolicyConfig, off_policy_correction
from slime_like.metrics.typed import MetricAccumulator
from slime_like.types import Sample, TrainSample


@dataclass(frozen=True, slots=True)
class SampleCorrection:
    """keep_mask: [R] bool; importance_weights: [R] float32. None as in `Correction`."""

    keep_mask: Tensor | None = None
    importance_weights: Tensor | None = None


def correct_steps(
    config: OffPolicyConfig,
    steps: Sequence[Sequence[TrainSample]],
    old_log_probs: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[list[SampleCorrection], dict[str, float]]:
    """The correction of each of this rank's samples, counted over all steps, and metrics over the
    whole rollout.

    steps: this rank's samples of each optimizer step. old_log_probs: [R] by sample, over all steps.
    group: data-parallel ranks, each of which calls this with as many steps. Raises ValueError when
    active tokens have no log-probs of the sampler: see `sampler_told`.
    """
    function = (
        None
        if config.custom_tis_function_path is None
        else load_function(config.custom_tis_function_path, "--custom-tis-function-path")
    )
    accumulator = MetricAccumulator()
    corrections: list[SampleCorrection] = []
    for step in steps:
        old = old_log_probs[len(corrections) : len(corrections) + len(step)]
        correction = _correct(config, function, step, old, group)
        accumulator.add(correction.metrics)
        lengths = [s.response_length for s in step]
        keeps = _split(correction.keep_mask, lengths)
        weights = _split(correction.importance_weights, lengths)
        corrections += [SampleCorrection(keep, weight) for keep, weight in zip(keeps, weights)]
    return corrections, with_ess(accumulator.reduce(group))


def _correct(
    config: OffPolicyConfig,
    function: Callable[..., Any] | None,
    step: Sequence[TrainSample],
    old: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Correction:
    """One optimizer step."""
    rollout = [_rollout_log_probs(sample, o) for sample, o in zip(step, old)]
    masks = [s.loss_mask for s in step]
    if function is not None:
        totals = [int(s.tokens.numel()) for s in step]
        return custom_correction(
            function,
            config,
            old_log_probs=old,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=totals,
        )
    lengths = torch.tensor([s.response_length for s in step])
    return off_policy_correction(
        config,
        old_log_probs=torch.cat(list(old)),
        rollout_log_probs=torch.cat(rollout),
        loss_mask=torch.cat(masks),
        seq_ids=torch.repeat_interleave(torch.arange(len(step)), lengths),
        num_seqs=len(step),
        group=group,
    )


def _rollout_log_probs(sample: TrainSample, old: Tensor) -> Tensor:
    """The sampler's log-probs [R]; those of a sample that trains nothing may be missing."""
    if sample.rollout_log_probs is not None:
        return sample.rollout_log_probs
    if sample.loss_mask.any():
        raise ValueError(
            "a sample has no log-probs of the sampler, which the off-policy correction needs"
        )
    return old


def sampler_told(samples: Sequence[Sample]) -> bool:
    """Whether every sample of a rollout that trains something has log-probs of the sampler.
    samples: of all ranks, so that all decide alike."""
    return all(s.rollout_log_probs is not None or not s.loss_mask.any() for s in samples)


def require_sampler_log_probs(config: OffPolicyConfig, samples: Sequence[Sample]) -> None:
    """Raises ValueError naming a sample without log-probs when a correction is on."""
    if config.enabled and not sampler_told(samples):
        first = next(s for s in samples if s.rollout_log_probs is None and s.loss_mask.any())
        raise ValueError(
            f"sample {first.sample_id} has no log-probs of the sampler (rollout_log_probs), which the off-policy correction needs; "
            "record rollouts with them, or leave --tis-ratio-type and the other corrections out"
        )


def _split(values: Tensor | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if values is None else torch.split(values, list(lengths))
