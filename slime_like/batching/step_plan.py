"""The split of a rollout into optimizer steps and over data-parallel ranks.

All ranks know all samples of a rollout. Step k takes the k-th run of `global_batch_size` samples or
multi-sequence episodes, so that its samples and its loss are the same for every layout. `StepPlan`
alone decides which data-parallel rank trains on which of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arguments.schema import AlgorithmConfig
from slime_like.distributed import seqlen_balancing as balancing
from slime_like.megatron.micro_batching import work_per_token
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.samples.episodes import episodes_of
from slime_like.samples.index import AnySample

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Size of an optimizer step, and its split over data-parallel ranks: rank d gets the d-th
    block, or, with a `linear_cost` (see `seqlen_balancing.linear_cost`), samples of equal total
    cost; with `equal_counts` also the same number."""

    global_batch_size: int
    dp_size: int
    dp_rank: int
    linear_cost: float | None = None
    equal_counts: bool = True
    samples_together: int = 1  # number of adjacent samples that stay on one rank

    def steps(self, samples: Sequence[AnySample]) -> list[Sequence[AnySample]]:
        """The samples of each optimizer step, over all ranks."""
        size = self.global_batch_size
        first = episodes_of(samples).first
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
            # consecutive samples; ranks differ by at most one unit of samples that stay together
            units = len(lengths) // size
            bounds = [size * (units * d // self.dp_size) for d in range(self.dp_size + 1)]
            return [tuple(range(start, end)) for start, end in itertools.pairwise(bounds)]
        # parts of units with balanced costs, as indices of samples again
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

        work = []
        tokens = []
        for step, ranks in zip(lengths, positions):
            work.append(rank_imbalance(balancing.sequence_costs(step, self.linear_cost), ranks))
            tokens.append(rank_imbalance(np.asarray(step, dtype=np.float64), ranks))
        return {
            "perf/rank_work_max_over_mean": float(np.mean(work)),
            "perf/rank_tokens_max_over_mean": float(np.mean(tokens)),
        }


@dataclass(frozen=True, slots=True)
class DataParallelAssignment:
    """Samples of every rank in every optimizer step."""

    # [step][rank], ascending indices within the step
    positions: tuple[tuple[tuple[int, ...], ...], ...]
    dp_rank: int
    metrics: dict[str, float]  # plain numbers by name

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


def step_plan(
    algorithm: AlgorithmConfig,
    transformer: TransformerConfig,
    vocab_size: int,
    layout: ParallelLayout,
) -> StepPlan:
    """The policy's step plan: how samples are split into optimizer steps and over data-parallel
    ranks, balanced by the model's cost if configured."""
    assert algorithm.global_batch_size is not None, "completed when the command line is parsed"
    cost = None
    if algorithm.balance_data:
        cost = work_per_token(transformer, vocab_size)
    return StepPlan(
        algorithm.global_batch_size,
        layout.dp_size,
        layout.dp_rank,
        linear_cost=cost,
        equal_counts=not algorithm.use_dynamic_batch_size,
        samples_together=algorithm.samples_together,
    )
