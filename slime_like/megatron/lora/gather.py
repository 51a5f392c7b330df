"""Gather full LoRA factors, under PEFT's names, from the shards of all ranks, and scatter them
back. Collective, with equal results on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.lora.adapter import shard_of, shard_shape
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.megatron.lora.targets import Factor
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES, Parameter, TensorPlan, plan_buckets
from slime_like.weights.gather import WeightStream, find_senders
from slime_like.weights.parameter_map import any_expert


def gather_factors(
    network: LoraNetwork, value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every factor, in the network's order, on every rank. value: maps a
    parameter to the tensor to gather, e.g. its gradient."""
    factors = itertools.chain.from_iterable(target.all_factors for target in network.targets)
    full = dict(factor_stream(network, value))  # an adapter is small
    return ((factor.name, full[factor.peft_name]) for factor in factors)


def factor_stream(
    network: LoraNetwork,
    value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach(),
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightStream:
    """(PEFT's name, full tensor) of every factor. value: see `gather_factors`."""
    layout = network.layout
    gpt = network.gpt
    local: dict[str, Tensor] = {}
    for adapter in network.adapters:
        local |= {factor.name: value(parameter) for factor, parameter in adapter.factors()}
    stages = _stages(network)
    dtype = _common_dtype({tensor.dtype for tensor in local.values()}, network)
    factors: dict[str, Factor] = {}
    parameters = []
    for target in network.targets:
        stage = stages[any_expert(target.parameter)]
        for factor in target.all_factors:
            factors[factor.name] = factor
            parameter = Parameter(
                factor.name,
                stage,
                factor.expert,
                shape=shard_shape(factor, layout, gpt),
                dtype=dtype,
                sharded=factor.dim is not None,
                outputs=(TensorPlan(factor.peft_name, factor.shape, dtype),),
            )
            parameters.append(parameter)

    def assemble(
        parameter: Parameter, shards: Sequence[Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        factor = factors[parameter.name]
        full = shards[0] if factor.dim is None else torch.cat(list(shards), factor.dim)
        outputs[factor.peft_name].copy_(full[: factor.shape[0]])

    plan = plan_buckets(
        parameters,
        find_senders(layout),
        network.base.sizes.experts // layout.ep_size,
        bucket_bytes,
    )
    return WeightStream(plan, layout, network.device, lambda p: local[p.name], assemble)


@torch.no_grad()
def set_factors(network: LoraNetwork, full: Mapping[str, Tensor]) -> None:
    """Write full factors into this rank's shards and update the optimizer's copies."""
    for adapter in network.adapters:
        for factor, parameter in adapter.factors():
            parameter.copy_(shard_of(full[factor.name], factor, network.layout, network.gpt))
    network.weights_changed()


def _stages(network: LoraNetwork) -> dict[str, int]:
    """Pipeline stage of each weight with an adapter; experts without their index."""
    layout = network.layout
    layers = itertools.chain.from_iterable(adapter.layers for adapter in network.adapters)
    stages: list[list[str]] = [[] for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, sorted(set(map(any_expert, layers))), group=layout.pp_group)
    result: dict[str, int] = {}
    for stage, names in enumerate(stages):
        result |= dict.fromkeys(names, stage)
    return result


def _common_dtype(local: set[torch.dtype], network: LoraNetwork) -> torch.dtype:
    """The common dtype over all stages; a stage may have no factors."""
    per_stage: list[set[torch.dtype]] = [set() for _ in range(network.layout.pp_size)]
    dist.all_gather_object(per_stage, local, group=network.layout.pp_group)
    (dtype,) = set().union(*per_stage)
    return dtype
