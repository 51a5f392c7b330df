"""Sends samples to the data-parallel ranks, of policy and critic, that train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.moe import moe_layers
from slime_like.batching.step_plan import DataParallelAssignment, StepPlan
from slime_like.distributed.collectives import gather, together
from slime_like.samples.exchange import deliver_samples, make_sharing
from slime_like.samples.index import AnySample, RemoteSample
from slime_like.types import Sample, SampleStatus

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class SampleDelivery:
    """Moves samples to the ranks that train on them. Collective over all ranks.

    Args:
        transformer: The policy's.
        plan: The policy's step plan.
        critic_plan: None without a critic.
        replays_rollout: Send routed experts too.
        buffer_size: Bytes in flight per rank.
    """

    def __init__(
        self,
        transformer: TransformerConfig,
        plan: StepPlan,
        critic_plan: StepPlan | None,
        *,
        replays_rollout: bool,
        buffer_size: int,
    ) -> None:
        self._transformer = transformer
        self._policy_plan = plan
        plans = [plan] if critic_plan is None else [plan, critic_plan]
        # each with the data-parallel rank of every rank
        self._plans = [(plan, gather(plan.dp_rank)) for plan in plans]
        self._replays_rollout = replays_rollout
        self._buffer_size = buffer_size
        # by rollout id: the samples of a prefetched rollout before and after delivery
        self._early: dict[int, tuple[Sequence[AnySample], list[AnySample]]] = {}

    def deliver_early(
        self, rollout_id: int, samples: Sequence[AnySample], group: dist.ProcessGroup | None
    ) -> None:
        """Deliver a prefetched rollout; a later `deliver` of the same samples returns the result.

        Args:
            group: Process group of all ranks, if the default group is in use by another thread.
        """
        delivered = self._exchange(samples, self._policy_plan.assign(samples), group)
        self._early[rollout_id] = (samples, delivered)

    def deliver(
        self,
        samples: Sequence[AnySample],
        assignment: DataParallelAssignment,
        rollout_id: int | None = None,
    ) -> list[AnySample]:
        """Exchange samples so that each rank holds those that it trains on.

        Args:
            samples: All samples of the rollout.
            assignment: The policy's.
            rollout_id: The id under which they may have been delivered early. Samples that were
                changed since then, on any rank, are exchanged again.

        Raises:
            ValueError: On all ranks; see `with_routed_experts`.
        """
        early = None if rollout_id is None else self._early.pop(rollout_id, None)
        if early is not None:
            before, delivered = early
            if len(before) == len(samples) and all(map(is_, before, samples)):
                return delivered
        return self._exchange(samples, assignment, None)

    def _exchange(
        self,
        samples: Sequence[AnySample],
        assignment: DataParallelAssignment,
        group: dist.ProcessGroup | None,
    ) -> list[AnySample]:
        if not self._replays_rollout:
            samples = without_routed_experts(samples)
        sharings = []
        for plan, dp_ranks in self._plans:
            assigned = assignment if plan is self._policy_plan else plan.assign(samples)
            parts = [assigned.indices_of(rank) for rank in range(plan.dp_size)]
            sharings.append(make_sharing(dp_ranks, parts))
        own = deliver_samples(samples, sharings, buffer_size=self._buffer_size, group=group)
        delivered = [own.samples.get(i, sample) for i, sample in enumerate(samples)]
        if not self._replays_rollout:
            return delivered
        config = self._transformer
        layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
        topk = config.moe_router_topk
        experts = config.num_moe_experts
        return together(
            lambda: with_routed_experts(delivered, layers=layers, topk=topk, experts=experts), group
        )


def without_routed_experts(samples: Sequence[AnySample]) -> list[AnySample]:
    """Drop routed experts that are not replayed, so that they are not sent."""
    return [
        s.without("routed_experts")
        if isinstance(s, RemoteSample)
        else replace(s, routed_experts=None)
        for s in samples
    ]


def with_routed_experts(
    samples: Sequence[AnySample], *, layers: int, topk: int, experts: int
) -> list[AnySample]:
    """Check the routed experts of this rank's samples; those without any that train nothing get -1.

    Args:
        layers: Number of MoE layers.

    Raises:
        ValueError: Names a sample without routed experts, or with those of another network.
    """
    return [
        replace(s, routed_experts=_checked_experts(s, layers, topk, experts))
        if isinstance(s, Sample)
        else s
        for s in samples
    ]


def _checked_experts(sample: Sample, layers: int, topk: int, experts: int) -> Tensor:
    """[L, layers, topk] int16."""
    shape = (sample.total_length, layers, topk)
    if sample.routed_experts is None:
        if sample.status == SampleStatus.ABORTED or not sample.active_tokens:
            return torch.full(shape, -1, dtype=torch.int16)
        raise ValueError(
            f"--use-rollout-routing-replay: sample {sample.sample_id} has no routed experts: it "
            "was recorded without this flag, or its engine does not report them"
        )
    found = sample.routed_experts
    if found.shape != shape or not bool(((found >= -1) & (found < experts)).all()):
        least, most = (int(found.min()), int(found.max())) if found.numel() else (0, 0)
        raise ValueError(
            f"--use-rollout-routing-replay: the routed experts of sample {sample.sample_id} are "
            f"{tuple(found.shape)} with numbers from {least} to {most}; expected (tokens, expert "
            f"layers, experts per token) = {shape} with numbers from -1 to {experts - 1}"
        )
    return found
