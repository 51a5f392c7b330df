"""A rollout becomes optimizer steps: which rank trains on which sample, token weights, and the
off-policy correction.

All ranks know all samples of a rollout. Step k takes the k-th run of `global_batch_size` samples or
multi-sequence episodes, so that its samples and its loss are the same for every layout. `StepPlan`
alone decides which data-parallel rank trains on which of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.advantages import Outcomes
from slime_like.distributed import seqlen_balancing as balancing
from slime_like.import_utils import load_function
from slime_like.losses.custom_tis import custom_correction
from slime_like.losses.mismatch import step_mismatch, with_ess
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.total import reduction_weights
from slime_like.metrics.typed import MetricAccumulator
from slime_like.sample_index import AnySample, RemoteSample, untrained
from slime_like.types import (
    Episodes,
    Sample,
    SampleStatus,
    TrainBatch,
    TrainSample,
    complete,
    episodes_of,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Size of an optimizer step, and its split over data-parallel ranks: rank d gets the d-th
    block, or, with a `linear_cost` (see `seqlen_balancing.linear_cost`), samples of equal total
    cost; with `equal_counts` also the same number. `samples_together`: number of adjacent samples
    that stay on one rank."""

    global_batch_size: int
    dp_size: int
    dp_rank: int
    linear_cost: float | None = None
    equal_counts: bool = True
    samples_together: int = 1

    def steps(self, samples: Sequence[AnySample]) -> list[Sequence[AnySample]]:
        """The samples of each optimizer step, over all ranks."""
        size, first = self.global_batch_size, episodes_of(samples).first
        assert len(first) % size == 0, (len(first), size)
        if len(first) < len(samples) and self.equal_counts:
            raise ValueError(
                "episodes of several sequences make optimizer steps of unequal size; add "
                "--use-dynamic-batch-size and --max-tokens-per-gpu"
            )
        bounds = [*first[::size], len(samples)]
        return [samples[start:end] for start, end in itertools.pairwise(bounds)]

    def assign(self, samples: Sequence[AnySample]) -> DataParallelAssignment:
        """Assign samples to ranks. Equal on all ranks, without communication."""
        lengths: list[list[int]] = []
        for step in self.steps(samples):
            lengths.append([s.total_length for s in step])
        positions = tuple(tuple(self._assign_step(step)) for step in lengths)
        metrics = {} if self.linear_cost is None else self._metrics(lengths, positions)
        return DataParallelAssignment(positions, self.dp_rank, metrics)

    def _assign_step(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """The sample indices of each rank, for the sample lengths of one step."""
        size = self.samples_together
        if self.linear_cost is None:
            units = len(lengths) // size
            bounds = [size * (units * d // self.dp_size) for d in range(self.dp_size + 1)]
            return [tuple(range(start, end)) for start, end in itertools.pairwise(bounds)]
        costs = balancing.unit_sums(balancing.sequence_costs(lengths, self.linear_cost), size)
        return [
            tuple(balancing.members(part, size).tolist())
            for part in balancing.partition(costs, self.dp_size, equal_counts=self.equal_counts)
        ]

    def _metrics(
        self, lengths: Sequence[Sequence[int]], positions: Sequence[Sequence[Sequence[int]]]
    ) -> dict[str, float]:
        """Load imbalance (maximum over mean of the ranks), by cost and by tokens, averaged over the
        optimizer steps."""
        assert self.linear_cost is not None

        def rank_imbalance(values: np.ndarray, ranks: Sequence[Sequence[int]]) -> float:
            return balancing.imbalance(np.array([values[list(indices)].sum() for indices in ranks]))

        work, tokens = [], []
        for step, ranks in zip(lengths, positions):
            work.append(rank_imbalance(balancing.sequence_costs(step, self.linear_cost), ranks))
            tokens.append(rank_imbalance(np.asarray(step, dtype=np.float64), ranks))
        return {
            "perf/rank_work_max_over_mean": float(np.mean(work)),
            "perf/rank_tokens_max_over_mean": float(np.mean(tokens)),
        }


@dataclass(frozen=True, slots=True)
class DataParallelAssignment:
    """Samples of every rank in every optimizer step. positions: [step][rank], ascending indices
    within the step. metrics: plain numbers by name. Defines the order in which this rank's samples
    are computed."""

    positions: tuple[tuple[tuple[int, ...], ...], ...]
    dp_rank: int
    metrics: dict[str, float]

    def indices_in_step(self, step: int) -> tuple[int, ...]:
        """Indices of this rank's samples within an optimizer step."""
        return self.positions[step][self.dp_rank]

    def indices_of(self, rank: int) -> list[int]:
        """Indices of a data-parallel rank's samples among all samples of the rollout."""
        indices: list[int] = []
        start = 0
        for step in self.positions:
            indices += [start + i for i in step[rank]]
            start += sum(map(len, step))
        return indices

    @property
    def local_indices(self) -> list[int]:
        """`indices_of` this rank."""
        return self.indices_of(self.dp_rank)


def mask_failed(sample: AnySample) -> AnySample:
    """Mask out an aborted sample. A sample without a finite reward keeps its mask, and so all
    denominators, and gets advantage 0."""
    if sample.status == SampleStatus.ABORTED:
        sample = untrained(sample)
    elif sample.status != SampleStatus.FAILED:
        return sample
    if isinstance(sample, RemoteSample):
        return sample.with_reward(math.nan)
    return replace(sample, reward=math.nan)


def check_token_sets(samples: Sequence[AnySample], *, wanted: bool) -> None:
    """Raise ValueError unless all samples that are trained on have token sets, or with `wanted`
    False none has."""
    for s in samples:
        if wanted and s.active_tokens and not s.has("token_sets"):
            raise ValueError(
                f"--renormalize-sampled-log-probs: sample {s.sample_id} has no sampling mask; it "
                "was recorded without this flag, or the engine does not report sampling masks"
            )
        if not wanted and s.has("token_sets"):
            raise ValueError(
                f"sample {s.sample_id} was recorded with --renormalize-sampled-log-probs: its "
                "log-probs are normalised over the sampling mask; give this flag, and the "
                "--rollout-top-k and --rollout-top-p of that run"
            )


def step_weights(
    step: Sequence[AnySample],
    reduction: str,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
) -> list[float]:
    """The token weight `u` of each sample of one optimizer step. The sequences of an episode count
    as one sample, so that the loss does not depend on how it was split."""
    episodes = episodes_of(step)
    active = _sum_by_episode(episodes, [s.active_tokens for s in step])
    weights = reduction_weights(
        reduction,
        active_tokens=active,
        rollout_ids=torch.tensor([step[i].sample_id for i in episodes.first]),
        prompt_ids=torch.tensor([step[i].group_id for i in episodes.first]),
        loss_norm_length=loss_norm_length,
        micro_batch_size=micro_batch_size,
    )
    return [float(weights[i]) for i in episodes.of]


def _sum_by_episode(episodes: Episodes, counts: Sequence[int]) -> Tensor:
    """Sum per-sample `counts` over the samples of each episode: [episodes] int64."""
    sums = torch.zeros(len(episodes.first), dtype=torch.int64)
    return sums.index_add(0, torch.tensor(episodes.of), torch.tensor(counts, dtype=torch.int64))


def nll_weights(step: Sequence[AnySample]) -> list[float]:
    """Token weight of the positive NLL term per sample: 1 / (active tokens of all samples of the
    step with a reward above 0) for those samples, 0 for others."""
    is_positive = [s.reward is not None and s.reward > 0 for s in step]
    tokens = sum(s.active_tokens for s, positive in zip(step, is_positive) if positive)
    return [1.0 / max(tokens, 1) if positive else 0.0 for positive in is_positive]


def outcomes_of(samples: Sequence[AnySample]) -> Outcomes:
    """Inputs of advantage estimators for all episodes of a rollout; a missing reward is NaN. Greedy
    rewards are set if every sample has one. Token rewards: of this rank's samples only."""
    episodes = episodes_of(samples)
    lengths = _sum_by_episode(episodes, [s.active_tokens for s in samples])
    samples = [samples[i] for i in episodes.first]
    rewards = [math.nan if s.reward is None else s.reward for s in samples]
    greedy = [s.greedy_reward for s in samples]
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([s.group_id for s in samples]),
        lengths=lengths,
        greedy_rewards=None if None in greedy else torch.tensor(greedy, dtype=torch.float64),
        token_rewards=[s.token_rewards if isinstance(s, Sample) else None for s in samples],
        some_have_token_rewards=any(s.has("token_rewards") for s in samples),
    )


def train_samples(
    plan: StepPlan,
    samples: Sequence[AnySample],
    *,
    reduction: str,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
    positive_nll: bool = False,
    assignment: DataParallelAssignment | None = None,
) -> list[list[TrainSample]]:
    """This rank's samples of each optimizer step with token weights; advantages and trainer
    log-probs are added later.

    Either all samples on all ranks have rollout log-probs (zeros in masked-out ones), or none has,
    so that all ranks behave alike.

    Args:
        micro_batch_size: For reductions that depend on it.
        positive_nll: Include the weights of the positive NLL term.
        assignment: The plan's, if known already.
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
                _train_sample(sample, weights[i], nll[i], with_log_probs=with_log_probs)
                for i, sample in zip(indices, local, strict=True)
            ]
        )
    return result


def _train_sample(
    sample: Sample, weight: float, nll_weight: float | None, *, with_log_probs: bool
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
        token_sets=sample.token_sets,
        routes=sample.routes,
        rewards=per_token(math.nan if sample.reward is None else sample.reward),
        nll_weights=None if nll_weight is None else per_token(nll_weight),
    )


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


@dataclass(frozen=True, slots=True)
class SampleCorrection:
    """Off-policy correction of one sample. keep_mask: [R] bool. importance_weights: [R] float32.
    None as in `Correction`."""

    keep_mask: Tensor | None = None
    importance_weights: Tensor | None = None


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
