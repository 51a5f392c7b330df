"""DeepSeek sparse attention (DeepSeek-V3.2, GLM-5): megatron-core's multi-latent attention,
restricted to the keys that an indexer selects for each query.

The indexer is not trained: there is no gradient through the selection, and its weights are buffers.
It is replicated over tensor-parallel ranks; context-parallel ranks gather its keys. A layer may
reuse the selection of the closest preceding layer with an indexer (GLM-5.2). Keys may be scored and
selected in pools (GLM-5.3, which has no rotary embedding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.ops.attention import PackedAttention, PackedRows
from slime_like.megatron.ops.context_parallel import gather_keys, gather_rows
from slime_like.megatron.ops.key_indexer import KeyIndexer
from slime_like.megatron.ops.sparse_attention import (
    far_rows,
    far_spans,
    most_keys,
    pooled,
    select_keys,
    sparse_attention,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules


KEY_NORM_EPSILON = 1e-6


def indexer_layer(config: TransformerConfig, number: int) -> int:
    """Number of the layer that selects keys for layer `number`, both from 1. Multi-token prediction
    layers, which come last, have their own indexers."""
    shared = config.index_shared or []
    while number <= len(shared) and shared[number - 1]:
        number -= 1
    return number


def has_far_queries(rows: PackedRows, config: TransformerConfig) -> bool:
    """Whether a query of these sequences attends to a selection."""
    return max(rows.lengths) > most_keys(config.index_topk, config.index_pool)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor, *, pairs: bool = False) -> Tensor:
    """Apply a rotary embedding, which turns halves or pairs, to the first dimensions of
    [T, heads, d]."""
    size = cosines.size(1)
    rotary = x[..., :size]
    rest = x[..., size:]
    if pairs:
        rotary = torch.cat([rotary[..., 0::2], rotary[..., 1::2]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    rotated_half = torch.cat([-second, first], dim=-1)
    cosines, sines = (y.unsqueeze(1).to(x.dtype) for y in (cosines, sines))
    return torch.cat([rotary * cosines + rotated_half * sines, rest], dim=-1)


class Indexer(KeyIndexer):
    """The lightning indexer of one layer."""

    wq_b: Tensor
    wk: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor
    pool_gate: Tensor  # with pools: projection to the scores of `pooled`, and their bias
    pool_bias: Tensor
    # in a model in half precision; published files have them in float32
    float32_buffers = ("k_norm_weight", "k_norm_bias", "weights_proj")

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.heads = config.index_n_heads
        self.dim = config.index_head_dim
        self.pool = config.index_pool
        shapes: dict[str, tuple[int, ...]] = {
            "wq_b": (self.heads * self.dim, config.q_lora_rank),
            "wk": (self.dim, config.hidden_size),
            "k_norm_weight": (self.dim,),
            "k_norm_bias": (self.dim,),
            "weights_proj": (self.heads, config.hidden_size),
        }
        if self.pool > 1:
            shapes |= {
                "pool_gate": (self.dim, config.hidden_size),
                "pool_bias": (self.pool, self.dim),
            }
        for name, shape in shapes.items():
            dtype = config.params_dtype
            if name in self.float32_buffers:
                dtype = torch.promote_types(dtype, torch.float32)
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        compressed: Tensor,
        rows: PackedRows,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Select the keys of the far queries of this rank; see `select_keys` and `chosen`.

        Args:
            hidden: [T, H], this rank's rows, also under sequence or context parallelism.
            compressed: [T, q_lora_rank], normalised query latent of the same rows.
            rotation: Cosines and sines of the rotary embedding, [positions, rotary dimensions].
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        norm = (self.k_norm_weight, self.k_norm_bias, KEY_NORM_EPSILON)
        keys = F.layer_norm(F.linear(hidden, self.wk).to(dtype), (self.dim,), *norm)
        keys = keys.to(hidden.dtype)
        if self.pool > 1:
            keys = torch.cat([keys, F.linear(hidden, self.pool_gate)], -1)
        weights = F.linear(hidden.to(dtype), self.weights_proj.to(dtype))
        if self.config.sequence_parallel:
            keys, weights, compressed = (
                gather_from_sequence_parallel_region(x, group=self.groups.tp)
                for x in (keys, weights, compressed)
            )
        if rows.context is not None:
            keys = gather_rows(keys, self.groups.cp)[rows.context.natural]
        topk = self.config.index_topk
        far = far_rows(rows, topk, self.pool) if rows.far is None else rows.far
        spans = far_spans(rows, most_keys(topk, self.pool))
        queries = F.linear(compressed[far.queries], self.wq_b).unflatten(1, (self.heads, self.dim))
        if rotation is not None:
            cosines, sines = rotation
            pairs = self.config.index_rotary_interleaved
            queries = rotated(queries, cosines[far.places], sines[far.places], pairs=pairs)
            places = far.key_places
            keys = rotated(keys.unsqueeze(1), cosines[places], sines[places], pairs=pairs)
            keys = keys.squeeze(1)
        if far.pools is not None:
            keys, scores = keys.chunk(2, -1)
            keys = pooled(keys, scores, self.pool_bias, far.pools)
        # 1 / sqrt(heads) and 1 / sqrt(dim), as in the published code
        weights = weights[far.queries] * (self.heads * self.dim) ** -0.5
        selected = select_keys(queries, weights, keys, spans, topk, self.pool, rows.lengths)
        return self.chosen(selected, rows)


class SparseLatentAttention(MLASelfAttention):
    """megatron-core's MLA with an indexer. It stores the selected keys in
    `PackedRows.selected_keys` by layer number, where core attention reads them."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        **settings: object,
    ) -> None:
        super().__init__(config, submodules, layer_number, **settings)
        self.indexer: Indexer | None = None
        if indexer_layer(config, layer_number) == layer_number:
            self.indexer = Indexer(config, self.pg_collection)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **settings: Any,
    ) -> tuple[Tensor, ...]:
        """As in megatron-core; it also selects keys if a sequence has more than a query attends
        to."""
        outputs: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **settings
        )
        rows = packed_seq_params
        assert isinstance(rows, PackedRows)
        if self.indexer is not None and has_far_queries(rows, self.config):
            rows.selected_keys[self.layer_number] = self.indexer(
                hidden_states.squeeze(1), self._normalised(outputs[3]), rows, self._rotation(rows)
            )
        return outputs

    def _rotation(self, rows: PackedRows) -> tuple[Tensor, Tensor] | None:
        """See `Indexer.forward`."""
        if not self.config.qk_pos_emb_head_dim:
            return None
        angles = self.rotary_pos_emb(max(rows.lengths), packed_seq=True)
        scale = 1.0
        if self.config.rope_type == "yarn":
            angles, scale = angles
        angles = angles[:, 0, 0]
        return angles.cos() * scale, angles.sin() * scale

    def _normalised(self, compressed: Tensor) -> Tensor:
        """Normalise the query latent if its norm is fused into the up-projection, as in Transformer
        Engine's layers; in the local ones it already is normalised."""
        projection = self.linear_q_up_proj
        weight = getattr(projection, "layer_norm_weight", None)
        if weight is None:
            return compressed
        return F.rms_norm(compressed, weight.shape, weight, projection.eps)

    def forward(self, *args: Any, packed_seq_params: Any = None, **settings: Any) -> Any:
        """As in megatron-core; it then drops the selection if no later layer or recomputation needs
        it."""
        output = super().forward(*args, packed_seq_params=packed_seq_params, **settings)
        if not (self.config.index_shared or self.checkpoint_core_attention):
            packed_seq_params.selected_keys.pop(self.layer_number, None)
        return output


class SparseAttention(PackedAttention):
    """Core attention to the selected keys. If queries attend to all keys, it is the full attention
    of `PackedAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **settings: Any,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, **settings)
        self.indexer_layer_number = indexer_layer(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        rows = packed_seq_params
        assert isinstance(rows, PackedRows) and attention_bias is None and attention_mask is None
        if not has_far_queries(rows, self.config):
            out: Tensor = super().forward(query, key, value, None, packed_seq_params=rows)
            return out
        if rows.context is not None:
            assert self.cp_group is not None
            key, value = gather_keys(key, value, rows.context, self.cp_group)
        with self._dropout_rng():
            out = sparse_attention(
                query, key, value, rows, rows.selected_keys[self.indexer_layer_number], self._sdpa
            )
        return out.reshape(out.size(0), -1)


def use_sparse_attention(layer: ModuleSpec) -> None:
    """Replace MLA by sparse attention in a layer spec."""
    attention = layer.submodules.self_attention
    attention.module = SparseLatentAttention
    attention.submodules.core_attention = SparseAttention
