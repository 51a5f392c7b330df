"""Samples to the ranks that train on them, of the policy and of the critic."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch.distributed as dist

from arguments.hf.moe import moe_layers
from slime_like.distributed.collectives import gather, together
from slime_like.rollout.sample_payload import with_routes, without_routes
from slime_like.rollout.sample_plane import deliver_samples, sharing_of
from slime_like.rollout.step_plan import DataParallelAssignment, StepPlan
from slime_like.sample_index import AnySample


class SampleDelivery:
    """Collective over all ranks. transformer: megatron-core's TransformerConfig of the policy. plan:
    the policy's. critic_plan: None without one. replays_rollout: the sampler's experts travel too.
    buffer_size: bytes under way at a time on a rank."""

    def __init__(
        self,
        transformer: Any,
        plan: StepPlan,
        critic_plan: StepPlan | None,
        *,
        replays_rollout: bool,
        buffer_size: int,
    ) -> None:
        self._transformer = transformer
        self._policy = plan
        plans = [plan] if critic_plan is None else [plan, critic_plan]
        self._plans = [(each, gather(each.dp_rank)) for each in plans]  # and of all other ranks
        self._replays_rollout = replays_rollout
        self._buffer_size = buffer_size
        # by the first sample's identity: a rollout's samples, and what came of them
        self._ahead: dict[int, tuple[Sequence[AnySample], list[AnySample]]] = {}

    def deliver_ahead(self, samples: Sequence[AnySample], group: dist.ProcessGroup | None) -> None:
        """Deliver a rollout before it is trained on; `deliver` of the same samples then has nothing
        to do.

        Args:
            group: Of all ranks, where the default one is in use meanwhile.
        """
        made = self._delivered(samples, self._policy.share(samples), group)
        self._ahead[id(samples[0])] = (samples, made)

    def deliver(
        self, samples: Sequence[AnySample], shares: DataParallelAssignment
    ) -> list[AnySample]:
        """The samples of a rollout, of which this rank has those that it trains on.

        Args:
            samples: All of them.
            shares: The policy's.

        Raises:
            ValueError: on all ranks, see `sample_payload.with_routes`.
        """
        before, made = self._ahead.pop(id(samples[0]), ((), []))
        if len(before) == len(samples) and all(map(is_, before, samples)):
            return made
        return self._delivered(samples, shares, None)

    def _delivered(
        self,
        samples: Sequence[AnySample],
        shares: DataParallelAssignment,
        group: dist.ProcessGroup | None,
    ) -> list[AnySample]:
        if not self._replays_rollout:
            samples = without_routes(samples)
        sharings = []
        for plan, dp_ranks in self._plans:
            assigned = shares if plan is self._policy else plan.share(samples)
            places = [assigned.indices_of(rank) for rank in range(plan.dp_size)]
            sharings.append(sharing_of(dp_ranks, places))
        own = deliver_samples(samples, sharings, buffer_size=self._buffer_size, group=group).samples
        here = [own.get(place, sample) for place, sample in enumerate(samples)]
        if not self._replays_rollout:
            return here
        config = self._transformer
        layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
        topk, experts = config.moe_router_topk, config.num_moe_experts
        return together(lambda: with_routes(here, layers=layers, topk=topk, experts=experts), group)
