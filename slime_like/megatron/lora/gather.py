"""An adapter's factors whole, under PEFT's names, out of the shards of all ranks, and back.
Collective, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.lora.adapter import shard_of, shard_shape
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.weights.hf_export import shards_of_all_ranks
from slime_like.weights.parameter_map import any_expert


def gather_factors(
    network: LoraNetwork, value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every factor, in the network's order, on every rank. value: what is
    taken of a parameter, e.g. its gradient."""
    layout, gpt, base = network.layout, network.gpt, network.base
    local = {
        factor.name: value(parameter)
        for adapter in network.adapters
        for factor, parameter in adapter.factors()
    }
    stages = _stages(network)
    dtypes = {
        value(parameter).dtype for adapter in network.adapters for _, parameter in adapter.factors()
    }
    dtype = _agreed_dtype(dtypes, network)
    for target in network.targets:
        stage = stages[any_expert(target.parameter)]
        for pair in target.factors:
            for factor in pair:
                if factor.name in local:
                    shard = local[factor.name].contiguous()
                else:
                    shard = torch.empty(
                        shard_shape(factor, layout, gpt), dtype=dtype, device=network.device
                    )
                shards = shards_of_all_ranks(
                    shard, stage, factor.expert, factor.dim is not None, base.sizes, layout
                )
                whole = shards[0] if factor.dim is None else torch.cat(shards, factor.dim)
                yield factor.name, whole[: factor.shape[0]].clone()


@torch.no_grad()
def set_factors(network: LoraNetwork, whole: Mapping[str, Tensor]) -> None:
    """Write whole factors into this rank's shards. The optimizer's copies follow."""
    for adapter in network.adapters:
        for factor, parameter in adapter.factors():
            parameter.copy_(shard_of(whole[factor.name], factor, network.layout, network.gpt))
    network.weights_changed()


def _stages(network: LoraNetwork) -> dict[str, int]:
    """Which pipeline stage has each weight with an adapter; experts without their numbers."""
    layout = network.layout
    mine = sorted({any_expert(name) for adapter in network.adapters for name in adapter.layers})
    stages: list[list[str]] = [[] for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, mine, group=layout.pp_group)
    return {name: stage for stage, names in enumerate(stages) for name in names}


def _agreed_dtype(mine: set[torch.dtype], network: LoraNetwork) -> torch.dtype:
    """A stage may have no factor of its own."""
    found: list[set[torch.dtype]] = [set() for _ in range(network.layout.pp_size)]
    dist.all_gather_object(found, mine, group=network.layout.pp_group)
    (dtype,) = set().union(*found)
    return dtype
