"""Sends samples to the data-parallel ranks, of policy and critic, that train on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.indexers import indexer_layers, selection_width, tokens_of_entry
from arguments.hf.moe import moe_layers
from slime_like.batching.step_plan import DataParallelAssignment, StepPlan
from slime_like.distributed.collectives import gather, together
from slime_like.samples.exchange import deliver_samples, make_sharing
from slime_like.samples.index import AnySample, RemoteSample
from slime_like.samples.indexer_topk import unknown_keys
from slime_like.types import Sample, SampleStatus

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


CHOICES = ("routed_experts", "indexer_topk")


class SampleDelivery:
    """Moves samples to the ranks that train on them. Collective over all ranks.

    Args:
        transformer: The policy's.
        plan: The policy's step plan.
        critic_plan: None without a critic.
        replayed: The choices of the engine that are sent too, see `RunConfig.replayed`.
        buffer_size: Bytes in flight per rank.
    """

    def __init__(
        self,
        transformer: TransformerConfig,
        plan: StepPlan,
        critic_plan: StepPlan | None,
        *,
        replayed: Collection[str],
        buffer_size: int,
    ) -> None:
        self._transformer = transformer
        self._policy_plan = plan
        plans = [plan] if critic_plan is None else [plan, critic_plan]
        # each with the data-parallel rank of every rank
        self._plans = [(plan, gather(plan.dp_rank)) for plan in plans]
        self._replayed = replayed
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
            ValueError: On all ranks; see `with_routed_experts` and `with_selected_keys`.
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
        samples = without_tensors(samples, [name for name in CHOICES if name not in self._replayed])
        sharings = []
        for plan, dp_ranks in self._plans:
            assigned = assignment if plan is self._policy_plan else plan.assign(samples)
            parts = [assigned.indices_of(rank) for rank in range(plan.dp_size)]
            sharings.append(make_sharing(dp_ranks, parts))
        own = deliver_samples(samples, sharings, buffer_size=self._buffer_size, group=group)
        delivered = [own.samples.get(i, sample) for i, sample in enumerate(samples)]
        if not self._replayed:
            return delivered
        return together(lambda: self._checked(delivered), group)

    def _checked(self, samples: list[AnySample]) -> list[AnySample]:
        config = self._transformer
        if "routed_experts" in self._replayed:
            layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
            sizes = {"topk": config.moe_router_topk, "experts": config.num_moe_experts}
            samples = with_routed_experts(samples, layers=layers, **sizes)
        if "indexer_topk" in self._replayed:
            samples = with_selected_keys(
                samples,
                indexers=sum(indexer_layers(config)),
                width=selection_width(config),
                tokens=tokens_of_entry(config),
            )
        return samples


def without_tensors(samples: Sequence[AnySample], names: Collection[str]) -> list[AnySample]:
    """Drop choices that are not replayed, so that they are not sent."""
    nothing: dict[str, Any] = dict.fromkeys(names)
    return [
        sample.without(*names) if isinstance(sample, RemoteSample) else replace(sample, **nothing)
        for sample in samples
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


def with_selected_keys(
    samples: Sequence[AnySample], *, indexers: int, width: int, tokens: int = 1
) -> list[AnySample]:
    """As `with_routed_experts`, for the keys that indexers selected (samples/indexer_topk.py).

    Args:
        indexers: Number of layers that have one.
        width: K, the most keys that a query attends to.
        tokens: Of a key: several of a compressed entry.

    Raises:
        ValueError: Names a sample without them, or with a key that a query does not see.
    """
    return [
        replace(s, indexer_topk=_checked_keys(s, indexers, width, tokens))
        if isinstance(s, Sample)
        else s
        for s in samples
    ]


def _checked_keys(sample: Sample, indexers: int, width: int, tokens: int) -> Tensor:
    """[max(0, L - K), indexers, K] int32."""
    flag = f"--use-rollout-indexer-replay: the selected keys of sample {sample.sample_id}"
    unknown = unknown_keys(sample.total_length, indexers, width)
    if sample.indexer_topk is None:
        if sample.status == SampleStatus.ABORTED or not sample.active_tokens or not len(unknown):
            return unknown
        raise ValueError(
            f"{flag} are missing: it was recorded without this flag, or its engine does not report "
            "them"
        )
    found = sample.indexer_topk
    if found.shape != unknown.shape:
        raise ValueError(
            f"{flag} are {tuple(found.shape)}; expected (tokens after the first {width}, indexers, "
            f"keys) = {tuple(unknown.shape)}"
        )
    seen = (width + 1 + torch.arange(len(found)).view(-1, 1, 1)) // tokens
    if bool(((found < -1) | (found >= seen)).any()):
        raise ValueError(
            f"{flag} are not all positions from -1 to that of the query: {int(found.min())} to "
            f"{int(found.max())}, of {sample.total_length} tokens"
        )
    return found


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
