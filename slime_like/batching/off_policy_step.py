"""Off-policy correction of a rollout, one optimizer step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.import_utils import load_function
from slime_like.losses.custom_tis import custom_correction
from slime_like.losses.mismatch import step_mismatch, with_ess
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.metrics.typed import MetricAccumulator
from slime_like.samples.index import AnySample
from slime_like.types import TrainSample


@dataclass(frozen=True, slots=True)
class SampleCorrection:
    """Off-policy correction of one sample."""

    keep_mask: Tensor | None = None  # [R] bool
    importance_weights: Tensor | None = None  # [R] float32


def correct_steps(
    config: OffPolicyConfig | None,
    steps: Sequence[Sequence[TrainSample]],
    old_log_probs: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[list[SampleCorrection], dict[str, float]]:
    """Off-policy correction of this rank's samples, in order over all steps, and metrics over the
    rollout. Collective over `group`.

    Args:
        config: None: no correction.
        steps: This rank's samples of each optimizer step; the number of steps is equal on all
            ranks.
        old_log_probs: [R] per sample, over all steps.
        group: Data-parallel ranks.

    Raises:
        ValueError: Active tokens have no rollout log-probs; see `has_rollout_log_probs`.
    """
    function = None
    if config is not None and config.custom_tis_function_path is not None:
        function = load_function(config.custom_tis_function_path, "--custom-tis-function-path")
    accumulator = MetricAccumulator()
    corrections: list[SampleCorrection] = []
    for step in steps:
        old = old_log_probs[len(corrections) : len(corrections) + len(step)]
        correction = _correct(config, function, step, old, group)
        accumulator.add(correction.metrics)
        lengths = [s.response_length for s in step]
        keep_masks = _split(correction.keep_mask, lengths)
        weights = _split(correction.importance_weights, lengths)
        corrections += map(SampleCorrection, keep_masks, weights)
    return corrections, with_ess(accumulator.reduce(group))


def _correct(
    config: OffPolicyConfig | None,
    function: Callable[..., object] | None,
    step: Sequence[TrainSample],
    old: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Correction:
    """Off-policy correction of one optimizer step."""
    rollout = [_rollout_log_probs(sample, o) for sample, o in zip(step, old)]
    masks = [s.loss_mask for s in step]
    if config is not None and function is not None:
        return custom_correction(
            function,
            config,
            old_log_probs=old,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=[int(s.tokens.numel()) for s in step],
        )
    lengths = torch.tensor([s.response_length for s in step])
    tensors = dict(
        old_log_probs=torch.cat(list(old)),
        rollout_log_probs=torch.cat(rollout),
        loss_mask=torch.cat(masks),
        seq_ids=torch.repeat_interleave(torch.arange(len(step)), lengths),
    )
    if config is None:
        return Correction(None, None, step_mismatch(**tensors, num_seqs=len(step))[1])
    return off_policy_correction(config, **tensors, num_seqs=len(step), group=group)


def _rollout_log_probs(sample: TrainSample, old: Tensor) -> Tensor:
    """Rollout log-probs [R]; a fully masked sample may have none."""
    if sample.rollout_log_probs is not None:
        return sample.rollout_log_probs
    if sample.loss_mask.any():
        raise ValueError("the off-policy correction needs rollout_log_probs, which a sample lacks")
    return old


def has_rollout_log_probs(samples: Sequence[AnySample]) -> bool:
    """Whether every sample with active tokens has rollout log-probs. samples: of all ranks, so that
    all decide alike."""
    return all(s.has("rollout_log_probs") or not s.active_tokens for s in samples)


def check_rollout_log_probs(config: OffPolicyConfig | None, samples: Sequence[AnySample]) -> None:
    """Raise ValueError naming a sample without rollout log-probs if a correction is on."""
    if config is not None and config.enabled and not has_rollout_log_probs(samples):
        first = next(s for s in samples if not s.has("rollout_log_probs") and s.active_tokens)
        raise ValueError(
            f"sample {first.sample_id} has no rollout_log_probs, which the off-policy correction "
            "needs; record rollouts with them, or remove --tis-ratio-type and other corrections"
        )


def _split(values: Tensor | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if values is None else torch.split(values, list(lengths))
