"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers after the last one,
each of which predicts one token further ahead.

For a token at position t, layer k combines the output of layer k - 1 at t (for k = 1 the final
hidden states of the model) with the embedding of token t + k. Its output predicts token t + k + 1
through the model's output layer. Hidden states, embedding and output layer are detached, so only
these layers are trained. They have no dropout and no auxiliary router losses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    _get_block_submodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import MicroBatch


class RowsAhead:
    """Shift values by `steps` rows within each sequence. Context-parallel ranks all-gather them."""

    def __init__(self, packed: PackedRows, steps: int, layout: ParallelLayout) -> None:
        self._group = layout.cp_group if layout.cp_size > 1 else None
        rows = packed.ahead[steps - 1]
        self._within = rows.within
        self._source = rows.source

    def __call__(self, values: Tensor) -> Tensor:
        """Shift [T, ...] of this rank's rows; zero or False after the end of a sequence."""
        if self._group is not None:
            gathered = values.new_empty(self._group.size() * values.size(0), *values.shape[1:])
            dist.all_gather_into_tensor(_bytes(gathered), _bytes(values), group=self._group)
            values = gathered
        shifted = values[self._source]
        beyond = ~self._within.view(-1, *(1 for _ in shifted.shape[1:]))
        return shifted.masked_fill_(beyond, 0)


def _bytes(values: Tensor) -> Tensor:
    """View bools as bytes for communication."""
    values = values.contiguous()
    return values.view(torch.uint8) if values.dtype == torch.bool else values


class _EmbeddingHiddenProjection(torch.nn.Linear):
    """Projection [T, 1, 2 H] -> [T, 1, H], replicated over tensor-parallel ranks. Under sequence
    parallelism each rank has some of the rows, and megatron-core sums the gradient of weights
    marked `sequence_parallel`."""

    def __init__(self, config: TransformerConfig) -> None:
        size = config.hidden_size
        super().__init__(2 * size, size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.weight)


class PredictionLayer(MegatronModule):
    """One multi-token prediction layer; its submodules are named as in megatron-core."""

    def __init__(
        self,
        config: TransformerConfig,
        block: TransformerBlockSubmodules,
        number: int,
        vp_stage: int | None,
    ) -> None:
        """number: index of the layer, from 1."""
        super().__init__(config=config)
        norm = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(block.layer_norm, config=config, **norm)
        self.hnorm = build_module(block.layer_norm, config=config, **norm)
        self.eh_proj = _EmbeddingHiddenProjection(config)
        # the layer adds the offset of this stage itself
        offset = get_transformer_layer_offset(config, vp_stage)
        assert block.layer_specs is not None
        self.transformer_layer = build_module(
            block.layer_specs[0],
            config=config,
            layer_number=config.num_layers - offset + number,
            vp_stage=vp_stage,
        )
        self.final_layernorm = build_module(block.layer_norm, config=config, **norm)

    @property
    def mtp_model_layer(self) -> object:
        """Name under which megatron-core's schedules look for `transformer_layer` since 0.17;
        checkpoints keep the old name."""
        return self.transformer_layer

    def forward(self, hidden: Tensor, embedded: Tensor, **layer: object) -> Tensor:
        """hidden, embedded, and the result: [T, 1, H], or [T / tp, 1, H] under sequence
        parallelism. layer: further arguments of the transformer layer."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        out = self.transformer_layer(
            hidden_states=F.linear(joined, self.eh_proj.weight), attention_mask=None, **layer
        )
        normed: Tensor = self.final_layernorm(out[0])
        return normed


class PredictionLayers(MegatronModule):
    """All multi-token prediction layers of a model, part of its last chunk.

    embedding: [V_padded / tp, H], the detached embedding weight, or a copy if the embedding is on
    another pipeline stage; see `update_embedding`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        block: TransformerBlockSubmodules,
        count: int,
        vp_stage: int | None,
    ) -> None:
        """block: submodules of a one-layer block, from `prediction_block`."""
        config = copy.copy(config)
        config.hidden_dropout = config.attention_dropout = 0.0
        config.moe_router_load_balancing_type = "none"
        config.moe_aux_loss_coeff = 0.0
        config.moe_z_loss_coeff = None
        super().__init__(config=config)
        self.layers = torch.nn.ModuleList(
            PredictionLayer(config, block, number + 1, vp_stage) for number in range(count)
        )
        self.embedding: Tensor | None = None

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor | None,
        packed: PackedRows,
        batch: MicroBatch,
        layout: ParallelLayout,
    ) -> list[Tensor]:
        """Compute the outputs of all layers for one micro-batch. Collective over tensor- and
        context-parallel ranks.

        Args:
            hidden: [1, T, H], final hidden states of the model ([1, T / tp, H] under sequence
                parallelism).
            rotary: The model's rotary embedding.
            packed: Packed sequences of the micro-batch.

        Returns:
            Hidden states of each layer, in the shape of `hidden`.
        """
        assert self.embedding is not None
        # [T, 1, H], or this rank's [T / tp, 1, H] under sequence parallelism
        states = hidden.detach().transpose(0, 1).contiguous()
        outputs = []
        layer = {"rotary_pos_emb": rotary, "packed_seq_params": packed}
        tracker = tensor_parallel.get_cuda_rng_tracker()
        with tracker.fork() if self.config.sequence_parallel else nullcontext():
            for number, module in enumerate(self.layers):
                ahead = RowsAhead(packed, number + 1, layout)
                states = module(states, self._embedded(ahead(batch.tokens[0]), layout), **layer)
                outputs.append(states.transpose(0, 1).contiguous())
        return outputs

    @torch.no_grad()
    def _embedded(self, tokens: Tensor, layout: ParallelLayout) -> Tensor:
        """Embed tokens [T] to [T, 1, H], or this rank's rows under sequence parallelism."""
        assert self.embedding is not None
        size = self.embedding.size(0)
        local = tokens - layout.tp_rank * size
        is_local = (local >= 0) & (local < size)
        embedded = self.embedding[torch.where(is_local, local, 0)]
        embedded.masked_fill_(~is_local.unsqueeze(1), 0)
        if layout.tp_size > 1:
            dist.all_reduce(embedded, group=layout.tp_group)
        if self.config.sequence_parallel:
            embedded = embedded.chunk(layout.tp_size)[layout.tp_rank]
        return embedded.unsqueeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """As for megatron-core's modules."""
        state: dict[str, object] = {}
        for number, module in enumerate(self.layers):
            assert isinstance(module, PredictionLayer)
            name = f"{prefix}layers.{number}."
            state |= module.sharded_state_dict(name, sharded_offsets, metadata)
        return state


def one_layer(config: TransformerConfig) -> TransformerConfig:
    """Config of a one-layer network like a prediction layer: attention, and MoE if the model has
    it."""
    single = copy.copy(config)
    single.num_layers = single.pipeline_model_parallel_size = 1
    single.virtual_pipeline_model_parallel_size = single.pipeline_model_parallel_layout = None
    single.num_layers_in_first_pipeline_stage = single.num_layers_in_last_pipeline_stage = None
    single.account_for_embedding_in_pipeline_split = False
    single.account_for_loss_in_pipeline_split = False
    single.moe_layer_freq = 1
    if config.linear_attention_freq:
        single.linear_attention_freq = [0]
    return single


def prediction_block(config: TransformerConfig, spec: object) -> TransformerBlockSubmodules:
    """Submodules of the one-layer block.

    Args:
        config: From `one_layer`.
        spec: Its `decoder_spec`.
    """
    return _get_block_submodules(config, spec, None, 0)


def prediction_of(chunks: Sequence[MegatronModule]) -> PredictionLayers | None:
    """The prediction layers among a model's chunks; None on ranks without them."""
    layers = getattr(unwrap_model(chunks[-1]), "mtp", None)
    assert layers is None or isinstance(layers, PredictionLayers)
    return layers


@torch.no_grad()
def update_embedding(chunks: Sequence[MegatronModule], layout: ParallelLayout) -> None:
    """Update the prediction layers' embedding weight, before each training pass. With pipeline
    parallelism the first stage sends it to the last, unless it is tied to the output layer."""
    layers = prediction_of(chunks)
    last_chunk = unwrap_model(chunks[-1])
    if layout.pp_size == 1 or last_chunk.share_embeddings_and_output_weights:
        if layers is not None:
            if last_chunk.share_embeddings_and_output_weights:
                weight = last_chunk.base_head_weight()
            else:
                weight = unwrap_model(chunks[0]).embedding.word_embeddings.weight
            layers.embedding = weight.detach()
        return
    ends = dist.get_process_group_ranks(layout.pp_group)
    if layout.is_first_stage:
        weight = unwrap_model(chunks[0]).embedding.word_embeddings.weight
        dist.send(weight.detach(), ends[-1], group=layout.pp_group)
    if layers is not None:
        if layers.embedding is None:
            layers.embedding = torch.empty_like(last_chunk.base_head_weight())
        dist.recv(layers.embedding, ends[0], group=layout.pp_group)
