"""Gated delta nets (Qwen3-Next, Qwen3.5), which replace attention in a layer, and the zero-centered
norms of such models.

The input projection yields query, key, values, gates, rates and decays per group (the value heads
that share one key head). Groups are sharded over tensor-parallel ranks. The recurrence and its
convolution need full sequences: context-parallel ranks exchange their parts of all groups for full
sequences of some groups by an all-to-all, and back before the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from slime_like.megatron.model.norms import ZeroCenteredRMSNorm
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.delta_rule import (
    DeltaRows,
    causal_conv,
    delta_rows,
    delta_rule,
    fla_rule,
)

IN_CHECKPOINTS = "self_attention.in_proj.layer_norm_"  # name of the input norm in checkpoints
SHARDED = ("conv_weight", "A_log", "dt_bias")  # over groups


class GatedAttention(SelfAttention):
    """megatron-core's SelfAttention with another output gate, for layers without Transformer
    Engine: the original compiles on first use, which takes seconds, and rounds to float32."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(dtype).sigmoid()).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Gated delta net: [T, 1, hidden] -> [T, 1, hidden], with this rank's rows under sequence or
    context parallelism. submodules: those of the attention that it replaces, of which only the two
    projections are used."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None, "the layer passes its process groups to its attention"
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.heads = config.linear_num_value_heads // config.linear_num_key_heads  # per group
        self.groups = config.linear_num_key_heads // self.tp_group.size()
        values = self.heads * self.value_dim
        self.channels = 2 * self.key_dim + values  # convolution channels per group
        self.widths = (self.channels, values, self.heads, self.heads)
        linear: dict[str, object] = dict(
            config=config, bias=False, is_expert=False, tp_group=self.tp_group
        )
        self.in_proj = submodules.linear_qkv(
            config.hidden_size,
            config.linear_num_key_heads * sum(self.widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.out_proj = submodules.linear_proj(
            config.linear_num_key_heads * values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )
        for name, parameter in self._make_parameters():
            self.register_parameter(name, parameter)
            if name in SHARDED:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _make_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters besides the projections, initialised as in Mamba: A = exp(A_log) is uniform in
        [1, 16] and dt_bias is 1."""
        heads = self.groups * self.heads
        taps = self.config.linear_conv_kernel_dim
        # the tracked generator, which differs between tensor-parallel ranks, is that of the device
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        like = {"dtype": self.config.params_dtype, "device": device}
        conv = torch.empty(self.groups * self.channels, 1, taps, **like)
        decay = torch.empty(heads, **like)
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                conv.uniform_(-(taps**-0.5), taps**-0.5)
                decay.uniform_(1, 16).log_()
        yield "conv_weight", torch.nn.Parameter(conv)
        yield "A_log", torch.nn.Parameter(decay)
        yield "dt_bias", torch.nn.Parameter(torch.ones(heads, **like))
        yield "norm_weight", torch.nn.Parameter(torch.ones(self.value_dim, **like))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: object = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(packed_seq_params, PackedRows) and attention_mask is None, (
            "rows are packed by slime_like.megatron.ops.attention.packed_rows, without a mask"
        )
        rows = _delta_rows_of(packed_seq_params)
        mixed, _bias = self.in_proj(hidden_states)
        x = mixed.squeeze(1).unflatten(1, (self.groups, -1))  # [T, groups, width]
        if packed_seq_params.context is None:
            out = self._delta(x, rows, first=0)
        else:
            natural = packed_seq_params.context.natural
            first = self.groups // self.cp_group.size() * self.cp_group.rank()
            out = self._delta(self._gather_sequences(x)[natural], rows, first)
            out = self._scatter_rows(torch.zeros_like(out).index_copy(0, natural, out))
        output, bias = self.out_proj(out.flatten(1).unsqueeze(1))
        return output, bias

    def _gather_sequences(self, x: Tensor) -> Tensor:
        """All-to-all from this rank's rows [T / cp, groups, n] to all rows of some groups
        [T, groups / cp, n], in rank order."""
        ranks = self.cp_group.size()
        outgoing = x.unflatten(1, (ranks, -1)).transpose(0, 1)  # by receiving rank
        received: Tensor = all_to_all(self.cp_group, outgoing)
        return received.flatten(0, 1)

    def _scatter_rows(self, x: Tensor) -> Tensor:
        """The inverse of `_gather_sequences`."""
        ranks = self.cp_group.size()
        received: Tensor = all_to_all(self.cp_group, x.unflatten(0, (ranks, -1)))
        return received.transpose(0, 1).flatten(1, 2)

    def _delta(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """Convolution, delta rule and gated norm of full sequences. x: [T, G, width], the G groups
        of this rank from index `first`. Returns [T, G, heads per group * value_dim]."""
        size = x.size(1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        heads = slice(first * self.heads, (first + size) * self.heads)
        mixed, gate, rate, decay = x.split(self.widths, -1)
        channels = slice(first * self.channels, (first + size) * self.channels)
        weight = self.conv_weight[channels].squeeze(1).to(dtype)
        mixed = F.silu(causal_conv(mixed.flatten(1).to(dtype), weight, rows)).to(x.dtype)
        parts = mixed.unflatten(1, (size, -1)).split([self.key_dim] * 2 + [self.widths[1]], -1)
        query, key, value = parts
        value = value.reshape(value.size(0), -1, self.value_dim)
        a_log = self.A_log[heads].to(dtype)
        bias = self.dt_bias[heads].to(dtype)
        log_decay = -a_log.exp() * F.softplus(decay.flatten(1).to(dtype) + bias)
        fla = fla_rule() if x.is_cuda and not self.config.deterministic_mode else None
        rule = delta_rule if fla is None or x.dtype != torch.bfloat16 else fla
        out = rule(query, key, value, log_decay, rate.flatten(1).to(dtype).sigmoid(), rows)
        return self._gated_norm(out, gate.reshape(value.shape)).view(x.size(0), size, -1)

    def _gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head times silu of its gate. out, gate: [T, heads, value_dim]."""
        dtype = torch.promote_types(out.dtype, torch.float32)
        # replicated weight, sharded heads: backward sums its gradient over the ranks
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        normed = F.rms_norm(out.to(dtype), out.shape[-1:], eps=self.config.layernorm_epsilon)
        return (weight * normed.to(out.dtype) * F.silu(gate.to(dtype))).to(out.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """As for megatron-core's modules."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        parameters: dict[str, object] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)
        state: dict[str, object] = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def insert_delta_nets(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    transformer_impl: str,
    vp_stage: int | None,
) -> None:
    """Put the gated delta nets and zero-centered norms of `config` into the layer specs of a model
    chunk, which so far all have attention. Transformer Engine's norms support zero-centered weights
    themselves."""
    local = transformer_impl != "transformer_engine"
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for number, layer in enumerate(block.layer_specs):
        parts = layer.submodules
        attention = layer.submodules.self_attention
        if local and config.layernorm_zero_centered_gamma:
            parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredRMSNorm
            attention.module = GatedAttention
            attention.submodules.q_layernorm = ZeroCenteredRMSNorm
            attention.submodules.k_layernorm = ZeroCenteredRMSNorm
        if config.linear_attention_freq[first + number]:
            names = parts.sharded_state_dict_keys_map
            submodules = replace(
                parts,
                self_attention=ModuleSpec(GatedDeltaNet, submodules=attention.submodules),
                sharded_state_dict_keys_map={
                    name: IN_CHECKPOINTS if name == "input_layernorm." else stored
                    for name, stored in names.items()
                },
            )
            block.layer_specs[number] = replace(layer, submodules=submodules)
    if local and config.layernorm_zero_centered_gamma:
        block.layer_norm = ZeroCenteredRMSNorm


def _delta_rows_of(packed: PackedRows) -> DeltaRows:
    if packed.delta is None:  # shared by all layers
        packed.delta = delta_rows(packed.cu_seqlens_q, packed.lengths)
    rows: DeltaRows = packed.delta
    return rows
