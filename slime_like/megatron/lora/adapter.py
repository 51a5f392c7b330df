"""Parameters of one adapter on this rank: a module with the LoRA factors of a model chunk.

A critic's adapter also has a value head, on the chunk with the output layer; it is replicated on
every tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from arguments.schema import GPTModelConfig
from slime_like.megatron.lora.base import VALUE_HEAD, LoraBase
from slime_like.megatron.lora.config import LoraSpec
from slime_like.megatron.lora.layers import ColumnLora, HeadLora, Lora, Ranks, RowLora
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
        mine = [target for target in targets if target.parameter in slots]
        self._factors = {f.name: f for target in mine for pair in target.factors for f in pair}
        self.parameters_by_name = torch.nn.ParameterDict()
        for factor in self._factors.values():
            self.parameters_by_name[_key(factor.name)] = self._new(factor, base, spec)
        self.layers: dict[str, Lora] = {
            target.parameter: self._layer(target, base, spec) for target in mine
        }
        self.value_head: ValueHead | None = None
        if spec.value_head and base.has_head(index):
            self.value_head = ValueHead(self.config).to(base.device)

    @property
    def acting(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """This chunk's layers, as an argument of `LoraBase.active`."""
        return (
            dict(self.layers)
            if self.value_head is None
            else {**self.layers, VALUE_HEAD: self.value_head.values}
        )

    def factors(self) -> Iterator[tuple[Factor, torch.nn.Parameter]]:
        for factor in self._factors.values():
            yield factor, self.parameters_by_name[_key(factor.name)]

    def summed(self) -> Iterator[tuple[torch.nn.Parameter, object]]:
        """(parameter, group) of parameters with gradients to be summed over the group."""
        for factor, parameter in self.factors():
            ranks = _ranks(self.layout, self.config, factor)
            if factor.dim is None and ranks.needs_sum(at_head=_of_head(factor)):
                yield parameter, ranks.group
        if (
            self.value_head is not None and self.config.sequence_parallel
        ):  # each rank only has its part of the tokens
            for parameter in self.value_head.parameters():
                yield parameter, self.layout.tp_group

    def _new(self, factor: Factor, base: LoraBase, spec: LoraSpec) -> torch.nn.Parameter:
        whole = first_factor(factor, spec.seed) if factor.is_first else torch.zeros(factor.shape)
        shard = shard_of(whole, factor, self.layout, base.gpt)
        parameter = torch.nn.Parameter(shard.to(base.device, self.config.params_dtype, copy=True))
        ranks = _ranks(self.layout, self.config, factor)
        # megatron-core's gradient norm counts tensor-parallel parameters on every rank, and
        # `shared` ones not at all
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if factor.dim is None and ranks.group.rank() > 0:
            parameter.shared = True  # type: ignore[attr-defined]
        parameter.allreduce = not (factor.expert is not None and self.layout.ep_size > 1)  # type: ignore[attr-defined]
        return parameter

    def _layer(self, target: Target, base: LoraBase, spec: LoraSpec) -> Lora:
        pairs = [
            (self.parameters_by_name[_key(a.name)], self.parameters_by_name[_key(b.name)])
            for a, b in target.factors
        ]
        ranks = _ranks(self.layout, self.config, target.factors[0][0])
        if target.parameter == HEAD:
            return HeadLora(*pairs[0], spec.scale)
        if isinstance(target.mapping, RowParallel):
            return RowLora(*pairs[0], spec.scale, ranks)
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
            here = ranks.group.rank()
            offsets = [] if factor.dim is None else [(factor.dim, here, ranks.size)]
            replica = (0, here if factor.dim is None else 0, _replica_rank(self.layout, factor))
            state[f"parameters_by_name.{_key(factor.name)}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{factor.name}",
                parameter,
                *offsets,
                replica_id=replica,
                allow_shape_mismatch=_of_head(factor),
            )
        for name, parameter in (
            [] if self.value_head is None else self.value_head.named_parameters()
        ):
            replica = (0, self.layout.tp_rank, self.layout.dp_cp_group.rank())
            key = f"{VALUE_HEAD}.{name}"
            state[key] = ShardedTensor.from_rank_offsets(
                f"{prefix}{key}", parameter, replica_id=replica
            )
        return state


def first_factor(factor: Factor, seed: int) -> Tensor:
    """The full lora_A of a new adapter, float32, determined by seed and name: PEFT's distribution,
    uniform within 1 / sqrt(in)."""
    digest = hashlib.sha256(f"{seed} {factor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(factor.fan_in)
    return torch.empty(factor.shape).uniform_(-bound, bound, generator=generator)


def shard_of(whole: Tensor, factor: Factor, layout: ParallelLayout, gpt: GPTModelConfig) -> Tensor:
    """This rank's shard; for the output layer, padded with zeros beyond the vocabulary."""
    if factor.dim is None:
        return whole
    rank, size = _place(layout, factor)
    if _of_head(factor):
        whole = F.pad(whole, (0, 0, 0, padded_vocab_size(gpt, layout.tp_size) - whole.size(0)))
    return whole.chunk(size, factor.dim)[rank]


def shard_shape(factor: Factor, layout: ParallelLayout, gpt: GPTModelConfig) -> tuple[int, int]:
    """Shape of a shard, equal on every rank that has one."""
    rows, columns = factor.shape
    if _of_head(factor) and factor.dim == 0:
        rows = padded_vocab_size(gpt, layout.tp_size)
    _, size = _place(layout, factor)
    return rows // (size if factor.dim == 0 else 1), columns // (size if factor.dim == 1 else 1)


def _of_head(factor: Factor) -> bool:
    return factor.name.startswith("lm_head.")


def _ranks(layout: ParallelLayout, config: TransformerConfig, factor: Factor) -> Ranks:
    if factor.expert is not None:
        return Ranks(layout.etp_group, layout.etp_size, False, True)
    return Ranks(layout.tp_group, layout.tp_size, bool(config.sequence_parallel), False)


def _place(layout: ParallelLayout, factor: Factor) -> tuple[int, int]:
    return (
        (layout.tp_rank, layout.tp_size)
        if factor.expert is None
        else (layout.etp_rank, layout.etp_size)
    )


def _replica_rank(layout: ParallelLayout, factor: Factor) -> int:
    return layout.dp_cp_group.rank() if factor.expert is None else layout.expert_dp_rank


def _key(name: str) -> str:
    """Parameter name without dots, which torch does not allow."""
    return name.replace(".", "/")
