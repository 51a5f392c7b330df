"""Parameters of one adapter on this rank: a module with the LoRA factors of a model chunk.

A critic's adapter also has a value head, on the chunk with the output layer; it is replicated on
every tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from arguments.schema import GPTModelConfig
from arguments.schema.lora import UNEMBEDDING
from slime_like.megatron.lora.base import VALUE_HEAD, LoraBase
from slime_like.megatron.lora.config import LoraSpec
from slime_like.megatron.lora.layers import (
    ColumnLora,
    HeadLora,
    Lora,
    Ranks,
    ReplicatedLora,
    RowLora,
)
from slime_like.megatron.lora.targets import HEAD, Factor, Target, output_order
from slime_like.megatron.model.gpt import padded_vocab_size
from slime_like.megatron.model.value import ValueHead
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.mappings import RowParallel

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class AdapterChunk(MegatronModule):
    """LoRA factors of one model chunk. They are parameters of this module only: data parallelism,
    optimizer and checkpoints get this module instead of the model."""

    def __init__(self, base: LoraBase, index: int, targets: list[Target], spec: LoraSpec) -> None:
        super().__init__(config=base.config)
        self.layout = base.layout
        slots = base.slots[index]
        local = [target for target in targets if target.parameter in slots]
        factors = itertools.chain.from_iterable(target.all_factors for target in local)
        self._factors = {factor.name: factor for factor in factors}
        self.parameters_by_name = torch.nn.ParameterDict()
        for factor in self._factors.values():
            self.parameters_by_name[_key(factor.name)] = self._make_parameter(factor, base, spec)
        self.layers: dict[str, Lora] = {
            target.parameter: self._make_layer(target, base, spec) for target in local
        }
        self.value_head: ValueHead | None = None
        if spec.value_head and base.has_head(index):
            self.value_head = ValueHead(self.config).to(base.device)

    @property
    def active_layers(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """This chunk's layers, as an argument of `LoraBase.active`."""
        layers: dict[str, Callable[[Tensor], Tensor]] = dict(self.layers)
        if self.value_head is not None:
            layers[VALUE_HEAD] = self.value_head.values
        return layers

    def factors(self) -> Iterator[tuple[Factor, torch.nn.Parameter]]:
        for factor in self._factors.values():
            yield factor, self.parameters_by_name[_key(factor.name)]

    def partial_gradients(self) -> Iterator[tuple[torch.nn.Parameter, dist.ProcessGroup]]:
        """(parameter, group) of parameters with partial gradients, to be summed over the group."""
        for factor, parameter in self.factors():
            ranks = _ranks(self.layout, self.config, factor)
            if factor.dim is None and ranks.needs_sum(at_head=_is_head_factor(factor)):
                yield parameter, ranks.group
        if self.value_head is not None and self.config.sequence_parallel:
            # each rank only has its part of the tokens
            for parameter in self.value_head.parameters():
                yield parameter, self.layout.tp_group

    def _make_parameter(self, factor: Factor, base: LoraBase, spec: LoraSpec) -> torch.nn.Parameter:
        full = first_factor(factor, spec.seed) if factor.is_first else torch.zeros(factor.shape)
        shard = shard_of(full, factor, self.layout, base.gpt)
        parameter = torch.nn.Parameter(shard.to(base.device, self.config.params_dtype, copy=True))
        ranks = _ranks(self.layout, self.config, factor)
        # megatron-core's gradient norm counts tensor-parallel parameters on every rank, and
        # `shared` ones not at all
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if factor.dim is None and ranks.group.rank() > 0:
            parameter.shared = True  # type: ignore[attr-defined]
        is_distributed_expert = factor.expert is not None and self.layout.ep_size > 1
        parameter.allreduce = not is_distributed_expert  # type: ignore[attr-defined]
        return parameter

    def _make_layer(self, target: Target, base: LoraBase, spec: LoraSpec) -> Lora:
        pairs = [
            (self.parameters_by_name[_key(a.name)], self.parameters_by_name[_key(b.name)])
            for a, b in target.factors
        ]
        ranks = _ranks(self.layout, self.config, target.factors[0][0])
        if target.parameter == HEAD:
            return HeadLora(*pairs[0], spec.scale)
        if isinstance(target.mapping, RowParallel):
            return RowLora(*pairs[0], spec.scale, ranks)
        if not target.mapping.sharded:
            return ReplicatedLora(*pairs[0], spec.scale)
        order = output_order(target, base.sizes, ranks.group.rank(), ranks.size)
        return ColumnLora([a for a, _ in pairs], [b for _, b in pairs], order, spec.scale, ranks)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: object = (),
        metadata: Mapping[str, object] | None = None,
    ) -> dict[str, ShardedTensor]:
        """As in megatron-core's modules: the position of each local shard in its full tensor."""
        state = {}
        for factor, parameter in self.factors():
            ranks = _ranks(self.layout, self.config, factor)
            rank = ranks.group.rank()
            offsets = [] if factor.dim is None else [(factor.dim, rank, ranks.size)]
            replica = (0, rank if factor.dim is None else 0, _replica_rank(self.layout, factor))
            state[f"parameters_by_name.{_key(factor.name)}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{factor.name}",
                parameter,
                *offsets,
                replica_id=replica,
                allow_shape_mismatch=_is_head_factor(factor),
            )
        if self.value_head is not None:
            replica = (0, self.layout.tp_rank, self.layout.dp_cp_group.rank())
            for name, parameter in self.value_head.named_parameters(VALUE_HEAD):
                state[name] = ShardedTensor.from_rank_offsets(
                    f"{prefix}{name}", parameter, replica_id=replica
                )
        return state


def first_factor(factor: Factor, seed: int) -> Tensor:
    """The full lora_A of a new adapter, float32, determined by seed and name: PEFT's distribution,
    uniform within 1 / sqrt(in)."""
    digest = hashlib.sha256(f"{seed} {factor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(factor.fan_in)
    return torch.empty(factor.shape).uniform_(-bound, bound, generator=generator)


def shard_of(full: Tensor, factor: Factor, layout: ParallelLayout, gpt: GPTModelConfig) -> Tensor:
    """This rank's shard; for the output layer, padded with zeros beyond the vocabulary."""
    if factor.dim is None:
        return full
    rank, size = _shard_rank(layout, factor)
    if _is_head_factor(factor):
        full = F.pad(full, (0, 0, 0, padded_vocab_size(gpt, layout.tp_size) - full.size(0)))
    return full.chunk(size, factor.dim)[rank]


def shard_shape(factor: Factor, layout: ParallelLayout, gpt: GPTModelConfig) -> tuple[int, int]:
    """Shape of a shard, equal on every rank that has one."""
    rows, columns = factor.shape
    if _is_head_factor(factor) and factor.dim == 0:
        rows = padded_vocab_size(gpt, layout.tp_size)
    _, size = _shard_rank(layout, factor)
    if factor.dim == 0:
        return rows // size, columns
    return rows, columns // size if factor.dim == 1 else columns


def _is_head_factor(factor: Factor) -> bool:
    module = factor.name.rpartition(".")[0]
    return module.rpartition(".")[2] in UNEMBEDDING


def _ranks(layout: ParallelLayout, config: TransformerConfig, factor: Factor) -> Ranks:
    if factor.expert is not None:
        return Ranks(layout.etp_group, layout.etp_size, False, True)
    return Ranks(layout.tp_group, layout.tp_size, bool(config.sequence_parallel), False)


def _shard_rank(layout: ParallelLayout, factor: Factor) -> tuple[int, int]:
    if factor.expert is None:
        return layout.tp_rank, layout.tp_size
    return layout.etp_rank, layout.etp_size


def _replica_rank(layout: ParallelLayout, factor: Factor) -> int:
    return layout.dp_cp_group.rank() if factor.expert is None else layout.expert_dp_rank


def _key(name: str) -> str:
    """Parameter name without dots, which torch does not allow."""
    return name.replace(".", "/")
