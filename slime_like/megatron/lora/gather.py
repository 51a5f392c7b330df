"""Gather full LoRA factors, under PEFT's names, from the shards of all ranks, and scatter them
back. Collective, with equal results on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.lora.adapter import shard_of, shard_shape
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.weights.gather import (
    DEFAULT_BUCKET_BYTES,
    Parameter,
    TensorPlan,
    WeightStream,
    find_senders,
    plan_buckets,
)
from slime_like.weights.parameter_map import any_expert


def gather_factors(
    network: LoraNetwork, value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every factor, in the network's order, on every rank. value: maps a
    parameter to the tensor to gather, e.g. its gradient."""
    layout, gpt = network.layout, network.gpt
    local = {
        factor.name: value(parameter)
        for adapter in network.adapters
        for factor, parameter in adapter.factors()
    }
    stages = _stages(network)
    dtype = _agreed_dtype({tensor.dtype for tensor in local.values()}, network)
    factors = {
        factor.name: (stages[any_expert(target.parameter)], factor)
        for target in network.targets
        for pair in target.factors
        for factor in pair
    }
    parameters = [
        Parameter(
            name, stage, factor.expert, shard_shape(factor, layout, gpt), dtype, factor.dim is not None,
            (TensorPlan(name, factor.shape, dtype),),
        )
        for name, (stage, factor) in factors.items()
    ]  # fmt: skip

    def assemble(
        parameter: Parameter, shards: Sequence[Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        _, factor = factors[parameter.name]
        whole = shards[0] if factor.dim is None else torch.cat(list(shards), factor.dim)
        outputs[factor.name].copy_(whole[: factor.shape[0]])

    plan = plan_buckets(
        parameters,
        find_senders(layout),
        network.base.sizes.experts // layout.ep_size,
        DEFAULT_BUCKET_BYTES,
    )
    stream = WeightStream(plan, layout, network.device, lambda p: local[p.name], assemble)
    whole = dict(stream)  # an adapter is small
    return ((name, whole[name]) for name in factors)


@torch.no_grad()
def set_factors(network: LoraNetwork, whole: Mapping[str, Tensor]) -> None:
    """Write full factors into this rank's shards and update the optimizer's copies."""
    for adapter in network.adapters:
        for factor, parameter in adapter.factors():
            parameter.copy_(shard_of(whole[factor.name], factor, network.layout, network.gpt))
    network.weights_changed()


def _stages(network: LoraNetwork) -> dict[str, int]:
    """Pipeline stage of each weight with an adapter; experts without their index."""
    layout = network.layout
    mine = sorted({any_expert(name) for adapter in network.adapters for name in adapter.layers})
    stages: list[list[str]] = [[] for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, mine, group=layout.pp_group)
    return {name: stage for stage, names in enumerate(stages) for name in names}


def _agreed_dtype(mine: set[torch.dtype], network: LoraNetwork) -> torch.dtype:
    """The common dtype over all stages; a stage may have no factors."""
    found: list[set[torch.dtype]] = [set() for _ in range(network.layout.pp_size)]
    dist.all_gather_object(found, mine, group=network.layout.pp_group)
    (dtype,) = set().union(*found)
    return dtype
