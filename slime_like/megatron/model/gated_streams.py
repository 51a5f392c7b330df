"""Qwen3.8-Flash-Next: gated residual streams (ops/hyper_connections.py), which replace the norms in
front of attention and MLP and the last one, and grouped-query attention to pooled keys (QSA).

An indexer scores the mean of the keys of each pool. It is not trained, as in sparse_attention.py,
and replicated over tensor-parallel ranks; context-parallel ranks gather its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.delta_specs import GatedAttention
from slime_like.megatron.model.hyper_connections import HyperConnectedLayer, HyperConnection
from slime_like.megatron.model.ngram_memory import NgramMemory
from slime_like.megatron.model.sparse_attention import SparseAttention, has_far_queries, rotated
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import gather_rows
from slime_like.megatron.ops.hyper_connections import read_gated_streams, write_gated_streams
from slime_like.megatron.ops.key_indexer import KeyIndexer
from slime_like.megatron.ops.sparse_attention import far_rows, far_spans, most_keys, select_keys

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class GatedConnection(HyperConnection):
    """A gated hyper-connection. Its parameters are those of `read_gated_streams`."""

    norm_weight: Tensor
    down_weight: Tensor
    up_weight: Tensor
    inject_weight: Tensor | None

    def make_parameters(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `HyperConnection`."""
        rank = self.config.stream_rank
        return {
            "norm_weight": torch.zeros(self.channels, **like),
            "down_weight": self.matrix(rank, self.channels, like),
            "up_weight": self.matrix(self.channels, rank, like),
            "inject_weight": self.matrix(self.streams, self.channels, like),
        }

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """See `HyperConnection`."""
        block_input, writing = read_gated_streams(
            streams,
            self.norm_weight,
            self.down_weight,
            self.up_weight,
            self.inject_weight,
            self.config.layernorm_epsilon,
        )
        return (block_input,) if writing is None else (block_input, writing)

    def write(self, streams: Tensor, output: Tensor, *weights: Tensor) -> Tensor:
        """See `HyperConnection`."""
        (writing,) = weights
        return write_gated_streams(streams, output, writing)


class FinalMixer(GatedConnection):
    """What reads the streams at the end, [T, N, H] -> [T, 1, H]. It has the arguments of
    megatron-core's norms."""

    inject_weight = None
    ends_streams = True

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(config)

    def make_parameters(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `HyperConnection`."""
        made = super().make_parameters(like)
        return {name: tensor for name, tensor in made.items() if name != "inject_weight"}

    def forward(self, streams: Tensor) -> Tensor:  # type: ignore[override]
        (mixed,) = super().forward(streams)
        return mixed


class GatedStreamsLayer(HyperConnectedLayer):
    """A layer with gated residual streams, and possibly a memory of n-grams in front of them."""

    connection = GatedConnection

    def __init__(self, config: TransformerConfig, *args: object, **settings: object) -> None:
        super().__init__(config, *args, **settings)
        layer = self.layer_number - 1
        self.ngram_memory = None
        if config.ngram_memory is not None and layer in config.ngram_memory.layers:
            self.ngram_memory = NgramMemory(config, layer, self.pg_collection)

    def _forward_attention(
        self, hidden_states: Tensor, *args: object, **settings: Any
    ) -> tuple[Tensor, Any]:
        if self.ngram_memory is not None:
            rows = settings["packed_seq_params"]
            hidden_states = hidden_states + self.ngram_memory(hidden_states, rows)
        return super()._forward_attention(hidden_states, *args, **settings)


class PoolIndexer(KeyIndexer):
    """The indexer of one layer. The weights of its norms are zero-centred."""

    query_key_weight: Tensor  # [(heads + 1) * d, hidden], of the queries and the key
    query_norm_weight: Tensor
    key_norm_weight: Tensor
    float32_buffers = ("query_norm_weight", "key_norm_weight")  # in a model in half precision

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.heads = config.index_n_heads
        self.dim = config.index_head_dim
        width = (self.heads + 1) * self.dim
        dtype = config.params_dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer(
            "query_key_weight", torch.zeros(width, config.hidden_size, dtype=dtype)
        )
        for name in self.float32_buffers:
            self.register_buffer(name, torch.zeros(self.dim, dtype=wide))

    @torch.no_grad()
    def forward(self, hidden: Tensor, rows: PackedRows, angles: Tensor) -> Tensor:
        """Select the keys of the far queries of this rank; see `select_keys` and `chosen`.

        Args:
            hidden: [T, H], this rank's rows, also under sequence or context parallelism.
            angles: [positions, rotary dimensions].
        """
        topk = self.config.index_topk
        pool = self.config.index_pool
        projected = F.linear(hidden, self.query_key_weight)
        if self.config.sequence_parallel:
            projected = gather_from_sequence_parallel_region(projected, group=self.groups.tp)
        queries, keys = projected.split([self.heads * self.dim, self.dim], -1)
        if rows.context is not None:
            keys = gather_rows(keys.contiguous(), self.groups.cp)[rows.context.natural]
        far = far_rows(rows, topk, pool) if rows.far is None else rows.far
        if far.pools is not None:
            wide = torch.promote_types(keys.dtype, torch.float32)
            keys = keys[far.pools].to(wide).mean(1).to(keys.dtype)
            starts = far.key_places[far.pools[:, 0]]
        else:
            starts = far.key_places
        cosines, sines = angles.cos(), angles.sin()
        queries = self._normalised(
            queries[far.queries].unflatten(1, (self.heads, self.dim)), self.query_norm_weight
        )
        keys = self._normalised(keys.unsqueeze(1), self.key_norm_weight)
        queries = rotated(queries, cosines[far.places], sines[far.places])
        keys = rotated(keys, cosines[starts], sines[starts]).squeeze(1)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weights = queries.new_full(queries.shape[:2], self.dim**-0.5, dtype=dtype)
        spans = far_spans(rows, most_keys(topk, pool))
        selected = select_keys(queries, weights, keys, spans, topk, pool, rows.lengths)
        return self.chosen(selected, rows)

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, x.shape[-1:], eps=self.config.layernorm_epsilon)
        return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)


class PooledKeysAttention(GatedAttention):
    """Grouped-query attention with an output gate, restricted to the keys of selected pools."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **settings: object,
    ) -> None:
        super().__init__(config, submodules, layer_number, **settings)
        self.indexer = PoolIndexer(config, self.pg_collection)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **settings: Any,
    ) -> Any:
        """As in megatron-core; it also selects keys if a sequence has more than a query attends
        to."""
        rows = packed_seq_params
        assert isinstance(rows, PackedRows)
        if has_far_queries(rows, self.config):
            rows.selected_keys[self.layer_number] = self.indexer(
                hidden_states.squeeze(1), rows, rotary_pos_emb[:, 0, 0]
            )
        output = super().forward(
            hidden_states,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **settings,
        )
        if not self.checkpoint_core_attention:  # else backward needs the selection
            rows.selected_keys.pop(self.layer_number, None)
        return output


def without_norm(layer: ModuleSpec) -> None:
    """Remove the norms in front of attention and MLP from a layer spec of megatron-core's, also
    from Transformer Engine's projection that begins with one."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    attention = parts.self_attention.submodules
    if attention.linear_qkv is not ColumnParallelLinear:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        attention.linear_qkv = TEColumnParallelLinear


def use_gated_streams(block: TransformerBlockSubmodules) -> None:
    """Put the blocks of this module into the layer specs of a model chunk, whose delta nets are in
    their place."""
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        attention = parts.self_attention
        if issubclass(attention.module, SelfAttention):
            attention.module = PooledKeysAttention
            attention.submodules.core_attention = SparseAttention
    block.layer_norm = FinalMixer
