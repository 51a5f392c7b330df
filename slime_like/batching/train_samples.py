"""Samples of each optimizer step as inputs of the loss, with their token weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime_like.batching.off_policy_step import has_rollout_log_probs
from slime_like.batching.step_plan import DataParallelAssignment, StepPlan
from slime_like.images.processor import ImageProcessor, LateImages
from slime_like.images.rows import ImageRows, image_rows
from slime_like.losses.reductions import reduction_weights
from slime_like.samples.episodes import complete, episodes_of
from slime_like.samples.index import AnySample
from slime_like.types import NOT_SAMPLED, Sample, TrainBatch, TrainSample


def step_weights(
    step: Sequence[AnySample],
    reduction: str,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
) -> list[float]:
    """The token weight `u` of each sample of one optimizer step. The sequences of an episode count
    as one sample, so that the loss does not depend on how it was split."""
    episodes = episodes_of(step)
    active = episodes.sums([s.active_tokens for s in step])
    weights = reduction_weights(
        reduction,
        active_tokens=active,
        rollout_ids=torch.tensor([step[i].sample_id for i in episodes.first]),
        prompt_ids=torch.tensor([step[i].group_id for i in episodes.first]),
        loss_norm_length=loss_norm_length,
        micro_batch_size=micro_batch_size,
    )
    return [float(weights[i]) for i in episodes.of]


def nll_weights(step: Sequence[AnySample]) -> list[float]:
    """Token weight of the positive NLL term per sample: 1 / (active tokens of all samples of the
    step with a reward above 0) for those samples, 0 for others."""
    is_positive = [s.reward is not None and s.reward > 0 for s in step]
    tokens = sum(s.active_tokens for s, positive in zip(step, is_positive) if positive)
    return [1.0 / max(tokens, 1) if positive else 0.0 for positive in is_positive]


def train_samples(
    plan: StepPlan,
    samples: Sequence[AnySample],
    *,
    reduction: str,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
    positive_nll: bool = False,
    assignment: DataParallelAssignment | None = None,
    image_processor: ImageProcessor | None = None,
) -> list[list[TrainSample]]:
    """This rank's samples of each optimizer step with token weights; advantages and trainer
    log-probs are added later.

    Either all samples on all ranks have rollout log-probs (zeros in masked-out ones), or none has,
    so that all ranks behave alike.

    Args:
        micro_batch_size: For reductions that depend on it.
        positive_nll: Include the weights of the positive NLL term.
        assignment: The plan's, if known already.
        image_processor: The model's, if samples may have images.
    """
    with_log_probs = has_rollout_log_probs(samples)
    assignment = assignment or plan.assign(samples)
    result = []
    for k, step in enumerate(plan.steps(samples)):
        weights = step_weights(step, reduction, loss_norm_length, micro_batch_size)
        nll = nll_weights(step) if positive_nll else [None] * len(weights)
        indices = assignment.indices_in_step(k)
        local = complete(step[i] for i in indices)
        result.append(
            [
                _train_sample(
                    sample,
                    weights[i],
                    nll[i],
                    with_log_probs=with_log_probs,
                    image_processor=image_processor,
                )
                for i, sample in zip(indices, local, strict=True)
            ]
        )
    return result


def _train_sample(
    sample: Sample,
    weight: float,
    nll_weight: float | None,
    *,
    with_log_probs: bool,
    image_processor: ImageProcessor | None,
) -> TrainSample:
    def per_token(value: float) -> Tensor:
        return torch.full((sample.response_length,), value, dtype=torch.float32)

    rollout_log_probs = sample.rollout_log_probs if with_log_probs else None
    if with_log_probs and rollout_log_probs is None:
        rollout_log_probs = per_token(0.0)
    return TrainSample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        loss_mask=sample.loss_mask,
        loss_weights=per_token(weight),
        rollout_log_probs=rollout_log_probs,
        sampling_mask=sample.sampling_mask,
        routed_experts=sample.routed_experts,
        indexer_topk=sample.indexer_topk,
        rewards=per_token(math.nan if sample.reward is None else sample.reward),
        nll_weights=None if nll_weight is None else per_token(nll_weight),
        images=images_of(sample, image_processor),
    )


def images_of(sample: Sample, processor: ImageProcessor | None) -> ImageRows | None:
    """The images of a sample and where its tokens stand for them; None if it has none.

    Raises:
        ValueError: Names the sample if tokens and images do not fit together.
    """
    if not sample.images:
        return None
    if processor is None:
        raise ValueError(
            f"sample {sample.sample_id} has images; give --multimodal-keys, so that the run has "
            "the model's image processor"
        )
    sampled = torch.zeros(sample.total_length, dtype=torch.bool)
    generated = sample.loss_mask  # of given answers
    if sample.weight_versions:
        generated = torch.tensor(sample.weight_versions) != NOT_SAMPLED
    sampled[sample.prompt_length :] = generated
    try:
        inputs = LateImages(processor, sample.images)
        return image_rows(sample.tokens, inputs, processor.rule, sampled)
    except ValueError as error:
        raise ValueError(f"sample {sample.sample_id}: {error}") from error


def map_steps(
    steps: Sequence[Sequence[TrainSample]], change: Callable[[int, TrainSample], TrainSample]
) -> list[TrainBatch]:
    """Apply `change(i, sample)` to every sample, i counting over all steps."""
    batches: list[TrainBatch] = []
    start = 0
    for step in steps:
        samples = [change(i, sample) for i, sample in enumerate(step, start)]
        batches.append(TrainBatch(tuple(samples)))
        start += len(step)
    return batches
