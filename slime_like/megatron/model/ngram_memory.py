"""The hashed memory of n-grams of Qwen3.8-Flash-Next, in front of some layers: a token's n-grams
are looked up in large tables, and residual streams take of what is there (ops/ngrams.py).

The rows of the tables are sharded over tensor-parallel ranks, as those of the embedding. Everything
else is on every rank; under sequence parallelism a rank has the gradient of its own rows. The
convolution needs full sequences: ranks of sequence and context parallelism exchange their rows of
all channels for full sequences of some channels, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.hyper_connections import INITIAL_STD
from slime_like.megatron.model.own_parameters import parameter_device
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import columns_for_rows, gather_rows, rows_for_columns
from slime_like.megatron.ops.ngrams import NgramRows, dilated_conv, ngram_rows, recall, table_rows

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class NgramMemory(MegatronModule):
    """The memory of one layer: residual streams [t, N, H] -> what is added to them."""

    key_weight: Tensor
    value_weight: Tensor
    key_norm_weight: Tensor
    query_norm_weight: Tensor
    conv_norm_weight: Tensor
    conv_weight: Tensor  # [N H, 1, taps]
    tables: Tensor  # rows of each head's
    offsets: Tensor

    def __init__(
        self, config: TransformerConfig, layer: int, groups: ProcessGroupCollection
    ) -> None:
        """layer: its number, from 0."""
        super().__init__(config=config)
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.settings = config.ngram_memory
        self.multipliers = self.settings.multipliers(layer)
        self.table = VocabParallelEmbedding(
            self.settings.rows(layer),
            self.settings.head_width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=groups.tp,
        )
        self.table.weight.is_embedding_or_output_parameter = True  # not for Muon
        device = parameter_device()
        like = {"dtype": config.params_dtype, "device": device}
        for name, tensor in self._make_parameters(like).items():
            parameter = torch.nn.Parameter(tensor)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        for name in ("tables", "offsets"):
            numbers = torch.tensor(getattr(self.settings, name)(layer), device=device)
            self.register_buffer(name, numbers, persistent=False)

    def _make_parameters(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """Initial values, the same on all tensor-parallel ranks. like: dtype and device."""
        config = self.config
        channels = config.residual_streams * config.hidden_size
        made = {
            "key_weight": torch.empty(channels, self.settings.width, **like),
            "value_weight": torch.empty(config.hidden_size, self.settings.width, **like),
        }
        if config.perform_initialization:
            for matrix in made.values():
                matrix.normal_(std=INITIAL_STD)
        norms = ("key_norm_weight", "query_norm_weight", "conv_norm_weight")
        made |= {name: torch.zeros(channels, **like) for name in norms}
        return made | {"conv_weight": torch.zeros(channels, 1, self.settings.taps, **like)}

    def forward(self, streams: Tensor, packed: PackedRows) -> Tensor:
        rows = self._ngrams(packed)
        ids = table_rows(rows.tokens, self.multipliers, self.tables, self.offsets)
        found = self.table(ids.t())  # megatron-core's "batch" is the head
        entries = found if self.config.sequence_parallel else found.transpose(0, 1)
        recalled, normed = recall(
            streams,
            entries.flatten(1),
            self.key_weight,
            self.value_weight,
            self.key_norm_weight,
            self.query_norm_weight,
            self.conv_norm_weight,
            self.config.layernorm_epsilon,
        )
        return recalled + self._convolved(normed.flatten(1), rows, packed).view_as(recalled)

    def _ngrams(self, packed: PackedRows) -> NgramRows:
        """Of the rows of this context-parallel rank; made by the first memory of a pass."""
        if packed.ngrams is None:
            assert packed.tokens is not None, "`add_tokens` was called with the chunk"
            tokens = packed.tokens
            settings = self.settings
            if self.cp_group.size() > 1:
                tokens = in_order(gather_rows(tokens, self.cp_group), packed)
            rows = ngram_rows(tokens, packed.cu_seqlens_q, settings.size, settings.end)
            by_rank = by_ranks(rows.tokens, packed).chunk(self.cp_group.size())
            packed.ngrams = NgramRows(by_rank[self.cp_group.rank()], rows.positions)
        return packed.ngrams

    def _convolved(self, x: Tensor, rows: NgramRows, packed: PackedRows) -> Tensor:
        """x: [t, channels], this rank's rows."""
        groups = [self.cp_group] if self.cp_group.size() > 1 else []
        if self.config.sequence_parallel:
            groups = [self.tp_group, *groups]
        weight = self.conv_weight.squeeze(1)
        for group in groups:
            x = rows_for_columns(x, group)
            weight = weight.chunk(group.size())[group.rank()]
        x = in_order(x, packed)
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = dilated_conv(x.to(dtype), weight.to(dtype), self.settings.size, rows.positions)
        out = by_ranks(F.silu(out).to(x.dtype), packed)
        for group in reversed(groups):
            out = columns_for_rows(out, group)
        return out


def in_order(x: Tensor, packed: PackedRows) -> Tensor:
    """The rows of all context-parallel ranks as natural rows. Those of preflight have no order."""
    return x if packed.context is None else x[packed.context.natural]


def by_ranks(x: Tensor, packed: PackedRows) -> Tensor:
    """The inverse of `in_order`."""
    if packed.context is None:
        return x
    return torch.zeros_like(x).index_copy(0, packed.context.natural, x)


def add_tokens(chunk: LanguageModule) -> None:
    """Give the packed rows of each pass through a chunk their tokens, on every pipeline stage."""
    chunk.register_forward_pre_hook(_tell_tokens, with_kwargs=True)


def _tell_tokens(
    module: torch.nn.Module, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    tokens = inputs[0] if inputs else settings["input_ids"]
    settings["packed_seq_params"].tokens = tokens[0]
