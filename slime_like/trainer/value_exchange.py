"""Critic side of a rollout. The critic may assign samples to other data-parallel ranks than the
policy; values and returns are exchanged between the two assignments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.rollout.step_plan import DataParallelAssignment, StepPlan, map_steps
from slime_like.sample_index import AnySample
from slime_like.types import TrainBatch, TrainSample


class ValueExchange:
    """One rollout under the critic's layout. Every method is collective.

    samples: of the rollout. steps: this rank's samples of each optimizer step, by the critic's
    assignment `shares`. policy, policy_shares: the policy's layout and assignment.
    """

    def __init__(
        self,
        backend: MegatronBackend,
        samples: Sequence[AnySample],
        steps: Sequence[Sequence[TrainSample]],
        shares: DataParallelAssignment,
        policy_shares: DataParallelAssignment,
    ) -> None:
        assert backend.critic is not None
        self._backend = backend
        self._critic, self._policy = backend.critic.layout, backend.layout
        self._lengths = [sample.response_length for sample in samples]
        self._steps = steps
        self._shares, self._policy_shares = shares, policy_shares
        self._values: list[Tensor] = []

    def compute_values(self) -> list[Tensor]:
        """Critic values of every response token, [R] float32 per sample of the policy's share."""
        self._values = self._backend.forward_critic(
            [sample for step in self._steps for sample in step]
        )
        return self._moved(self._values, self._shares, self._critic, self._policy_shares)

    def batches(self, returns: Sequence[Tensor]) -> list[TrainBatch]:
        """The critic's train batches, with the values of `compute_values`. returns: [R] float32 per
        sample of the policy's share."""
        own = self._moved(returns, self._policy_shares, self._policy, self._shares)
        return map_steps(
            self._steps,
            lambda i, sample: dataclasses.replace(sample, values=self._values[i], returns=own[i]),
        )

    def _moved(
        self,
        values: Sequence[Tensor],
        shares: DataParallelAssignment,
        layout: ParallelLayout,
        wanted: DataParallelAssignment,
    ) -> list[Tensor]:
        if self._critic is self._policy:
            return list(values)
        everyones = over_all_ranks(
            values, shares, self._lengths, layout.dp_group, self._backend.device
        )
        return [everyones[i] for i in wanted.local_indices]


def over_all_ranks(
    values: Sequence[Tensor],
    shares: DataParallelAssignment,
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Gather per-token values of all samples on every rank. Collective.

    Args:
        values: [R] float32 per sample of this rank.
        lengths: R of every sample of the rollout.
        group: Data-parallel ranks, in the order of `shares`.

    Returns:
        [R] float32 per sample of the rollout.
    """
    places = [shares.indices_of(rank) for rank in range(group.size())]
    totals = [sum(lengths[i] for i in of_rank) for of_rank in places]
    mine = torch.zeros(max(totals), dtype=torch.float32, device=device)
    mine[: totals[group.rank()]] = torch.cat([*values, torch.zeros(0)]).to(device)
    table = torch.empty(group.size() * max(totals), dtype=torch.float32, device=device)
    dist.all_gather_into_tensor(table, mine, group=group)
    found: dict[int, Tensor] = {}
    for of_rank, row in zip(places, table.view(group.size(), -1).cpu(), strict=True):
        sizes = [lengths[i] for i in of_rank]
        found |= dict(
            zip(of_rank, (part.clone() for part in row[: sum(sizes)].split(sizes)), strict=True)
        )
    return [found[i] for i in range(len(lengths))]


def plan_of_critic(policy: StepPlan, critic: ParallelLayout) -> StepPlan:
    """The policy's step plan, split over the critic's data-parallel ranks."""
    return dataclasses.replace(policy, dp_size=critic.dp_size, dp_rank=critic.dp_rank)
