"""Token weights of observations, i.e. environment output between model turns, for
--observation-loss-coef.

ECHO, arXiv 2605.24517: the mean cross-entropy over these tokens is added to the loss. Here the mean
is over the whole optimizer step on all ranks, so that it does not depend on how episodes are split
into sequences, or the step into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slime_like.batching.step_plan import DataParallelAssignment, StepPlan
from slime_like.samples.episodes import complete
from slime_like.samples.index import AnySample
from slime_like.types import NOT_SAMPLED, Sample, TrainSample


def with_observation_weights(
    plan: StepPlan,
    samples: Sequence[AnySample],
    assignment: DataParallelAssignment,
    steps: Sequence[Sequence[TrainSample]],
) -> list[list[TrainSample]]:
    """This rank's samples of each optimizer step, each with `observation_weights`.

    Args:
        plan, samples, assignment: As for `train_samples.train_samples`.
        steps: Its result.
    """
    result = []
    for k, (step, train_samples) in enumerate(zip(plan.steps(samples), steps, strict=True)):
        weight = 1.0 / max(sum(map(_num_observed, step)), 1)
        rollout_samples = complete(step[i] for i in assignment.indices_in_step(k))
        result.append(
            [
                replace(sample, observation_weights=weight * _observed(source))
                for sample, source in zip(train_samples, rollout_samples, strict=True)
            ]
        )
    return result


def _has_observations(sample: AnySample) -> bool:
    """Whether the sample is trained on and has weight versions, which mark generated tokens."""
    return sample.active_tokens > 0 and sample.versions_length > 0


def _num_observed(sample: AnySample) -> int:
    """Number of observation tokens in its response; known on every rank."""
    return (
        sample.response_length - sum(sample.version_counts.values())
        if _has_observations(sample)
        else 0
    )


def _observed(sample: Sample) -> Tensor:
    """[R] float32: 1 at response tokens that the model did not generate."""
    if not _has_observations(sample):
        return torch.zeros(sample.response_length)
    return (torch.tensor(sample.weight_versions) == NOT_SAMPLED).float()
