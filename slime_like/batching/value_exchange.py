"""Critic side of a rollout. The critic may assign samples to other data-parallel ranks than the
policy; values and returns are exchanged between the two assignments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.batching.step_plan import DataParallelAssignment, StepPlan
from slime_like.batching.train_samples import map_steps
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.samples.index import AnySample
from slime_like.types import TrainBatch, TrainSample


class ValueExchange:
    """One rollout under the critic's layout. Every method is collective.

    Args:
        samples: Of the rollout.
        steps: This rank's samples of each optimizer step, by the critic's assignment.
        assignment, policy_assignment: Of critic and policy.
    """

    def __init__(
        self,
        backend: MegatronBackend,
        samples: Sequence[AnySample],
        steps: Sequence[Sequence[TrainSample]],
        assignment: DataParallelAssignment,
        policy_assignment: DataParallelAssignment,
    ) -> None:
        assert backend.critic is not None
        self._backend = backend
        self._critic = backend.critic.layout
        self._policy = backend.layout
        self._lengths = [sample.response_length for sample in samples]
        self._steps = steps
        self._assignment = assignment
        self._policy_assignment = policy_assignment
        self._values: list[Tensor] = []

    def compute_values(self) -> list[Tensor]:
        """Critic values of every response token, [R] float32 per sample of the policy's share."""
        self._values = self._backend.forward_critic(list(chain.from_iterable(self._steps)))
        return self._move(self._values, self._assignment, self._critic, self._policy_assignment)

    def batches(self, returns: Sequence[Tensor]) -> list[TrainBatch]:
        """The critic's train batches, with the values of `compute_values`. returns: [R] float32 per
        sample of the policy's share."""
        returns = self._move(returns, self._policy_assignment, self._policy, self._assignment)

        def with_values(i: int, sample: TrainSample) -> TrainSample:
            return dataclasses.replace(sample, values=self._values[i], returns=returns[i])

        return map_steps(self._steps, with_values)

    def _move(
        self,
        values: Sequence[Tensor],
        source: DataParallelAssignment,
        layout: ParallelLayout,
        destination: DataParallelAssignment,
    ) -> list[Tensor]:
        """Exchange per-token values between two assignments. layout: of `source`."""
        if self._critic is self._policy:
            return list(values)
        gathered = gather_values(
            values, source, self._lengths, layout.dp_group, self._backend.device
        )
        return [gathered[i] for i in destination.local_indices]


def gather_values(
    values: Sequence[Tensor],
    assignment: DataParallelAssignment,
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Gather per-token values of all samples on every rank. Collective.

    Args:
        values: [R] float32 per sample of this rank.
        lengths: R of every sample of the rollout.
        group: Data-parallel ranks, in the order of `assignment`.

    Returns:
        [R] float32 per sample of the rollout.
    """
    indices = [assignment.indices_of(rank) for rank in range(group.size())]
    sizes = [[lengths[i] for i in rank_indices] for rank_indices in indices]
    padded = max(map(sum, sizes))
    local = torch.zeros(padded, dtype=torch.float32, device=device)
    local[: sum(sizes[group.rank()])] = torch.cat([*values, torch.zeros(0)]).to(device)
    table = torch.empty(group.size() * padded, dtype=torch.float32, device=device)
    dist.all_gather_into_tensor(table, local, group=group)
    gathered: dict[int, Tensor] = {}
    rows = table.view(group.size(), -1).cpu()
    for rank_indices, rank_sizes, row in zip(indices, sizes, rows, strict=True):
        parts = row[: sum(rank_sizes)].split(rank_sizes)
        gathered |= zip(rank_indices, (part.clone() for part in parts), strict=True)
    return [gathered[i] for i in range(len(lengths))]


def plan_of_critic(policy: StepPlan, critic: ParallelLayout) -> StepPlan:
    """The policy's step plan, split over the critic's data-parallel ranks."""
    return dataclasses.replace(policy, dp_size=critic.dp_size, dp_rank=critic.dp_rank)
