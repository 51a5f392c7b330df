"""DeepSeek-V4's attention to a window of tokens and to compressed entries
(ops/compressed_attention.py): queries of low rank, one vector per token that is key and value of
all heads, learned sinks, and an output projection of low rank by groups of heads. Values are turned
by the rotary embedding as keys are; the output is turned back by the query's position.

Layers have a window alone, or also all entries of many tokens each ("heavy", HCA), or those entries
of a few tokens that an indexer selects ("sparse", CSA). The indexer is not trained, as in
sparse_attention.py.

Heads, and groups of the output projection, are sharded over tensor-parallel ranks; the rest is on
every rank. Of what each row has alone, under sequence parallelism a rank has the gradient of its
own rows; entries are made of all rows on every rank, and have whole gradients. Context-parallel
ranks gather keys and what entries are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_cuda_rng_tracker,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.hyper_connections import INITIAL_STD, StreamsHead
from slime_like.megatron.model.ngram_memory import in_order
from slime_like.megatron.model.norms import rms_norm
from slime_like.megatron.model.own_parameters import parameter_device, sharded_state
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.compressed_attention import (
    compressed,
    compressed_attention,
    select_entries,
    turned,
)
from slime_like.megatron.ops.context_parallel import gather_rows
from slime_like.megatron.ops.entries import EntryRows, EntryTables
from slime_like.megatron.ops.key_indexer import KeyIndexer
from slime_like.megatron.ops.tables import compressed_tables
from slime_like.megatron.ops.window_attention import WindowAttention

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

OUTPUT = "output_weight"  # sharded over groups, along dimension 0


class Rotation:
    """Cosines and sines of the positions of one pass, [positions, pairs], in the dtype of
    activations, as transformers has them."""

    def __init__(self, angles: Tensor, dtype: torch.dtype) -> None:
        """angles: Of `EntryTables`."""
        self.cosines = angles.cos().to(dtype)
        self.sines = angles.sin().to(dtype)

    def turn(self, x: Tensor, places: Tensor, *, back: bool = False) -> Tensor:
        """Turn [n, heads, d] by positions [n]."""
        sines = self.sines[places]
        return turned(x, self.cosines[places], -sines if back else sines)


class Compressor(torch.nn.Module):
    """Makes the entries of one layer."""

    kv_weight: Tensor  # [d, hidden], with an overlap [2 d, hidden]
    gate_weight: Tensor
    position_bias: Tensor  # [rate, d] or [rate, 2 d]
    norm_weight: Tensor  # [d]
    float32_buffers: tuple[str, ...] = ()  # in a model in half precision

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        dim: int,
        rate: int,
        *,
        overlap: bool,
        trained: bool = True,
    ) -> None:
        """trained: Otherwise its weights are buffers."""
        super().__init__()
        self.config, self.groups = config, groups
        self.rate, self.overlap = rate, overlap
        width = 2 * dim if overlap else dim
        small = config.params_dtype
        if not trained:
            self.float32_buffers = ("position_bias", "norm_weight")
            small = torch.promote_types(small, torch.float32)
        matrices = {
            name: torch.zeros(
                width, config.hidden_size, dtype=config.params_dtype, device=parameter_device()
            )
            for name in ("kv_weight", "gate_weight")
        }
        others = {
            "position_bias": torch.zeros(rate, width, dtype=small, device=parameter_device()),
            "norm_weight": torch.ones(dim, dtype=small, device=parameter_device()),
        }
        for name, tensor in (matrices | others).items():
            if not trained:
                self.register_buffer(name, tensor)
                continue
            if name in matrices and config.perform_initialization:
                tensor.normal_(std=INITIAL_STD)
            parameter = torch.nn.Parameter(tensor)
            of_rows = name in matrices and config.sequence_parallel
            parameter.sequence_parallel = of_rows  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(
        self, hidden: Tensor, packed: PackedRows, entries: EntryRows, rotation: Rotation
    ) -> Tensor:
        """[P, 1, d], of all entries of the micro-batch. hidden: [t, H], this rank's rows, also
        under sequence or context parallelism."""
        both = torch.cat([F.linear(hidden, self.kv_weight), F.linear(hidden, self.gate_weight)], 1)
        if self.config.sequence_parallel:
            both = gather_from_sequence_parallel_region(
                both, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        vectors, scores = of_all_ranks(both, packed, self.groups).chunk(2, -1)
        made = compressed(vectors, scores, self.position_bias, entries, overlap=self.overlap)
        made = rms_norm(made, self.norm_weight, self.config.layernorm_epsilon)
        return rotation.turn(made.unsqueeze(1), entries.places)


def of_all_ranks(x: Tensor, packed: PackedRows, groups: ProcessGroupCollection) -> Tensor:
    """[T / cp, ...] -> [T, ...] in natural rows."""
    return in_order(gather_rows(x, groups.cp), packed) if groups.cp.size() > 1 else x


class EntryIndexer(KeyIndexer):
    """Selects entries of one layer."""

    wq_b: Tensor
    weights_proj: Tensor

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, rate: int
    ) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.compressor = Compressor(config, groups, self.dim, rate, overlap=True, trained=False)
        shapes = {
            "wq_b": (self.heads * self.dim, config.q_lora_rank),
            "weights_proj": (self.heads, config.hidden_size),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=config.params_dtype))

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        latent: Tensor,
        packed: PackedRows,
        tables: EntryTables,
        rotation: Rotation,
    ) -> Tensor:
        """See `select_entries` and `chosen`.

        Args:
            hidden: [t, H], this rank's rows, also under sequence or context parallelism.
            latent: [t, q_lora_rank], the normalised query latent of the same rows.
        """
        rate = self.compressor.rate
        keys = self.compressor(hidden, packed, tables.of_rate(rate), rotation).squeeze(1)
        queries = F.linear(latent, self.wq_b)
        weights = F.linear(hidden, self.weights_proj)
        if self.config.sequence_parallel:
            queries, weights = (
                gather_from_sequence_parallel_region(x, group=self.groups.tp)
                for x in (queries, weights)
            )
        queries = queries.unflatten(1, (self.heads, self.dim))
        queries = rotation.turn(queries, tables.places)
        wide = torch.promote_types(weights.dtype, torch.float32)
        weights = weights.to(wide) * (self.heads * self.dim) ** -0.5
        selected = select_entries(queries, weights, keys, packed, rate, self.config.entry_topk)
        return self.chosen(selected, packed)


class CompressedCore(WindowAttention):
    """Core attention to windows and entries, with sinks."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        packed_seq_params: PackedRows,
        rate: int,
        selected: Tensor | None,
    ) -> Tensor:
        """[T / cp, heads * d].

        Args:
            query: [T / cp, heads, d].
            key, value: [T + P, 1, d], the same: of tokens in natural rows, and of entries.
        """
        assert self.before is not None
        tokens = sum(packed_seq_params.lengths)
        with self._dropout_rng():
            out = compressed_attention(
                query,
                key[:tokens],
                key[tokens:],
                packed_seq_params,
                self._attend,
                before=self.before,
                rate=rate,
                selected=selected,
            )
        return out.flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None and self.softmax_offset is not None
        return self._with_sinks(query, key, value, mask, self.softmax_offset)


class CompressedAttention(MegatronModule):
    """Attention of one layer: [T, 1, hidden] -> [T, 1, hidden], with this rank's rows under
    sequence or context parallelism.

    rate: Tokens of an entry; 0 without entries.
    """

    query_down_weight: Tensor
    query_norm_weight: Tensor
    kv_weight: Tensor
    kv_norm_weight: Tensor
    output_weight: Tensor  # [groups / tp * rank, heads / groups * d]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None, "the layer passes its process groups to its attention"
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.rate = config.entry_rates[layer_number - 1]
        self.is_sparse = bool(config.entry_selection[layer_number - 1])
        self.dim = config.kv_channels
        heads = config.num_attention_heads
        self.groups = config.output_groups // self.tp_group.size()
        linear: dict[str, Any] = dict(
            config=config, bias=False, is_expert=False, tp_group=self.tp_group
        )
        self.linear_q_up_proj = ColumnParallelLinear(
            config.q_lora_rank,
            heads * self.dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.core_attention = CompressedCore(
            config, layer_number, AttnMaskType.causal, "self", pg_collection=pg_collection
        )
        self.linear_proj = RowParallelLinear(
            config.output_groups * config.output_rank,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        self._make_parameters()
        self.compressor: Compressor | None = None
        if self.rate:
            self.compressor = Compressor(
                config, pg_collection, self.dim, self.rate, overlap=self.is_sparse
            )
        self.indexer: EntryIndexer | None = None
        if self.is_sparse:
            self.indexer = EntryIndexer(config, pg_collection, self.rate)

    def _make_parameters(self) -> None:
        config = self.config
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": parameter_device()}
        whole = {
            "query_down_weight": torch.zeros(config.q_lora_rank, config.hidden_size, **like),
            "query_norm_weight": torch.ones(config.q_lora_rank, **like),
            "kv_weight": torch.zeros(self.dim, config.hidden_size, **like),
            "kv_norm_weight": torch.ones(self.dim, **like),
        }
        for name, tensor in whole.items():
            if tensor.dim() == 2 and config.perform_initialization:
                tensor.normal_(std=INITIAL_STD)
            parameter = torch.nn.Parameter(tensor)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        inner = config.num_attention_heads * self.dim // config.output_groups
        output = torch.zeros(self.groups * config.output_rank, inner, **like)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                output.normal_(std=INITIAL_STD)
        self.register_parameter(OUTPUT, torch.nn.Parameter(output))
        set_tensor_model_parallel_attributes(self.output_weight, True, 0, 1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        packed = packed_seq_params
        assert isinstance(packed, PackedRows) and attention_mask is None, (
            "rows are packed by slime_like.megatron.ops.attention.packed_rows, without a mask"
        )
        if packed.entries is None:  # shared by all layers
            packed.entries = compressed_tables(packed, self.config)
        tables: EntryTables = packed.entries
        hidden = hidden_states.squeeze(1)
        of_windows, of_entries = tables.angles
        rotation = Rotation(of_entries if self.rate else of_windows, hidden.dtype)
        epsilon = self.config.layernorm_epsilon
        latent = F.linear(hidden, self.query_down_weight)
        latent = rms_norm(latent, self.query_norm_weight, epsilon)
        query, _bias = self.linear_q_up_proj(latent.unsqueeze(1))
        query = query.squeeze(1).unflatten(1, (-1, self.dim))
        query = rotation.turn(rms_norm(query, None, epsilon), tables.places)
        keys = self._keys(hidden, packed, tables, rotation)
        selected = None
        if self.indexer is not None and max(packed.lengths) // self.rate > self.config.entry_topk:
            selected = self.indexer(hidden, latent, packed, tables, rotation)
        out = self.core_attention(
            query, keys, keys, packed_seq_params=packed, rate=self.rate, selected=selected
        )
        out = rotation.turn(out.unflatten(1, (-1, self.dim)), tables.places, back=True)
        grouped = out.reshape(out.size(0), self.groups, -1)
        by_group = self.output_weight.unflatten(0, (self.groups, -1))
        low_rank = torch.einsum("tgi,gri->tgr", grouped, by_group)
        output, bias = self.linear_proj(low_rank.flatten(1).unsqueeze(1))
        return output, bias

    def _keys(
        self, hidden: Tensor, packed: PackedRows, tables: EntryTables, rotation: Rotation
    ) -> Tensor:
        """[T + P, 1, d], of tokens and of entries, as this rank's heads use them: backward sums
        gradients over the tensor-parallel ranks."""
        keys = F.linear(hidden, self.kv_weight)
        keys = rms_norm(keys, self.kv_norm_weight, self.config.layernorm_epsilon).unsqueeze(1)
        if self.config.sequence_parallel:
            keys = gather_from_sequence_parallel_region(keys, group=self.tp_group)
        else:
            keys = copy_to_tensor_model_parallel_region(keys, group=self.tp_group)
        keys = of_all_ranks(rotation.turn(keys, tables.places), packed, self.pg_collection)
        if self.compressor is None:
            return keys
        entries = self.compressor(hidden, packed, tables.of_rate(self.rate), rotation)
        return torch.cat([keys, copy_to_tensor_model_parallel_region(entries, group=self.tp_group)])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """As for megatron-core's modules."""
        return sharded_state(self, {OUTPUT: 0}, prefix, sharded_offsets, metadata)


def use_compressed_attention(block: TransformerBlockSubmodules) -> None:
    """Put the blocks of this module into the layer specs of a model chunk."""
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm
        parts.self_attention = ModuleSpec(CompressedAttention)
        parts.sharded_state_dict_keys_map = {}
    block.layer_norm = StreamsHead
