"""Specs of transformer layers without Transformer Engine, of megatron-core's layers, attentions and
MLPs. megatron-core has such specs beside GPTModel only, which is deprecated.

What is sharded has the names in checkpoints that it has with Transformer Engine, whose projections
begin with the norms.
"""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from arguments.hf.moe import moe_layers
from slime_like.megatron.ops.attention import PackedAttention

NAMES_IN_CHECKPOINTS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def local_layer(
    config: TransformerConfig, core_attention: type[PackedAttention], *, experts: bool
) -> ModuleSpec:
    """A layer with a dense MLP or with experts."""
    norm = _norm(config)
    attention = _latent_attention if config.multi_latent_attention else _attention
    names = {} if config.multi_latent_attention else NAMES_IN_CHECKPOINTS
    parts = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=attention(core_attention, norm if config.qk_layernorm else IdentityOp),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=_experts(config) if experts else _mlp(),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=dict(names),
    )
    return ModuleSpec(TransformerLayer, submodules=parts)


def local_block(
    config: TransformerConfig, core_attention: type[PackedAttention], vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one model chunk; those that are alike share a spec."""
    dense = local_layer(config, core_attention, experts=False)
    sparse = dense
    if config.num_moe_experts is not None:
        sparse = local_layer(config, core_attention, experts=True)
    freq = None if config.num_moe_experts is None else config.moe_layer_freq
    of_model = [sparse if experts else dense for experts in moe_layers(freq, config.num_layers)]
    numbers = layers_of_chunk(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[of_model[number] for number in numbers], layer_norm=_norm(config)
    )


def layers_of_chunk(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Numbers of the layers of a chunk of this pipeline stage, from 0."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _norm(config: TransformerConfig) -> type:
    found: type = LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
    return found


def _attention(core_attention: type[PackedAttention], norm: type) -> ModuleSpec:
    """Grouped-query attention. norm: of queries and keys."""
    return ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(core_attention: type[PackedAttention], norm: type) -> ModuleSpec:
    """Multi-head latent attention. norm: of the latents."""
    return ModuleSpec(
        MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _mlp() -> object:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if hasattr(MLP, "as_mlp_submodule"):  # megatron-core 0.18 builds MLPs by functions
        return partial(MLP.as_mlp_submodule, submodules=parts)
    return ModuleSpec(MLP, submodules=parts)


def _experts(config: TransformerConfig) -> object:
    """As in megatron-core's specs of HybridModel."""
    return get_moe_module_spec(
        use_te=False,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
