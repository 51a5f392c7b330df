"""Delta nets and Mamba-2 in layer specs, gated attention and zero-centered norms of such models."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.delta_net import DeltaNetSubmodules, GatedDeltaNet
from slime_like.megatron.model.kimi_delta import KimiDeltaNet
from slime_like.megatron.model.layer_specs import layers_of_chunk
from slime_like.megatron.model.mamba import Mamba2
from slime_like.megatron.model.norms import ZeroCenteredRMSNorm
from slime_like.megatron.model.short_conv import ShortConv

IN_CHECKPOINTS = "self_attention.in_proj.layer_norm_"  # name of the input norm in checkpoints


class GatedAttention(SelfAttention):
    """megatron-core's SelfAttention with another output gate, for layers without Transformer
    Engine: the original compiles on first use, which takes seconds, and rounds to float32."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(dtype).sigmoid()).to(x.dtype)


def insert_delta_nets(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    transformer_impl: str,
    vp_stage: int | None,
) -> None:
    """Put the delta nets or Mamba-2, and the zero-centered norms, of `config` into the layer specs
    of a model chunk, which so far all have attention. Transformer Engine's norms support
    zero-centered weights themselves."""
    local = transformer_impl != "transformer_engine"
    numbers = layers_of_chunk(config, vp_stage)
    for index, (number, layer) in enumerate(zip(numbers, block.layer_specs, strict=True)):
        parts = layer.submodules
        attention = layer.submodules.self_attention
        if local and config.layernorm_zero_centered_gamma:
            parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredRMSNorm
            attention.module = GatedAttention
            attention.submodules.q_layernorm = ZeroCenteredRMSNorm
            attention.submodules.k_layernorm = ZeroCenteredRMSNorm
        if config.linear_attention_freq[number]:
            names = parts.sharded_state_dict_keys_map
            submodules = replace(
                parts,
                self_attention=_delta_net(attention.submodules, config),
                sharded_state_dict_keys_map={
                    name: IN_CHECKPOINTS if name == "input_layernorm." else stored
                    for name, stored in names.items()
                },
            )
            block.layer_specs[index] = replace(layer, submodules=submodules)
    if local and config.layernorm_zero_centered_gamma:
        block.layer_norm = ZeroCenteredRMSNorm


def _delta_net(
    attention: SelfAttentionSubmodules | MLASelfAttentionSubmodules, config: TransformerConfig
) -> ModuleSpec:
    """The delta net in place of an attention, with its kinds of projections. Of a latent attention
    that is the query's, which has no norm in front with Transformer Engine either."""
    if not getattr(config, "linear_decay_per_channel", False):
        parts = DeltaNetSubmodules(attention.linear_qkv, attention.linear_proj)
        if hasattr(config, "short_conv"):  # a ShortConvConfig
            return ModuleSpec(ShortConv, submodules=parts)
        mamba = hasattr(config, "block_pattern")  # a MambaConfig
        return ModuleSpec(Mamba2 if mamba else GatedDeltaNet, submodules=parts)
    parts = DeltaNetSubmodules(attention.linear_q_proj, attention.linear_proj)
    return ModuleSpec(KimiDeltaNet, submodules=parts)
