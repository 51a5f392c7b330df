"""Build a network: megatron-core's GPTModel or HybridModel (bases.py), one chunk per (virtual)
pipeline stage of this rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from arguments.schema import GPTModelConfig
from slime_like.megatron.model.bases import base_class, on_base
from slime_like.megatron.model.layer_specs import local_block, local_layer
from slime_like.megatron.model.policy import HalfPrecisionModule, PolicyModel
from slime_like.megatron.model.value import ValueModel
from slime_like.megatron.model.vision import SeesImages, add_vision
from slime_like.megatron.ops.attention import PackedAttention
from slime_like.megatron.ops.router import PackedRouter, tell_routers_tokens
from slime_like.megatron.parallel_layout import ParallelLayout

MODEL_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
)
# other settings that change what the weights compute -> name in config.json, if different
MODEL_FUNCTION = {
    "normalization": "", "layernorm_epsilon": "rms_norm_eps", "qk_layernorm": "",
    "gated_linear_unit": "", "add_bias_linear": "", "add_qkv_bias": "attention_bias",
    "rotary_interleaved": "", "post_self_attn_layernorm": "", "post_mlp_layernorm": "",
    "without_pre_norms": "",
    "qk_norm_of_all_heads": "", "yarn_rotary_scaling_factor": "",
    "yarn_original_max_position_embeddings": "", "yarn_beta_fast": "", "yarn_beta_slow": "",
    "yarn_mscale": "", "yarn_mscale_all_dim": "", "yarn_correction_range_round_to_int": "",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_layer_freq": "",
    "moe_router_topk": "num_experts_per_tok", "moe_router_pre_softmax": "not norm_topk_prob",
    "moe_router_score_function": "scoring_func",
    "moe_router_topk_scaling_factor": "routed_scaling_factor", "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group", "moe_router_enable_expert_bias": "",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "moe_shared_expert_gate": "", "moe_latent_size": "", "multi_latent_attention": "",
    "q_lora_rank": "",
    "kv_lora_rank": "", "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "", "rope_type": "",
    "rotary_scaling_factor": "", "original_max_position_embeddings": "", "beta_fast": "",
    "beta_slow": "", "mscale": "", "mscale_all_dim": "", "linear_attention_freq": "layer_types",
    "linear_num_key_heads": "", "linear_num_value_heads": "", "linear_key_head_dim": "",
    "linear_value_head_dim": "", "linear_conv_kernel_dim": "", "linear_decay_per_channel": "",
    "linear_decay_bound": "", "latent_unrotated": "", "attention_output_gate": "",
    "block_pattern": "layers_block_type", "mamba_smallest_step": "time_step_min",
    "layernorm_zero_centered_gamma": "", "window_size": "sliding_window",
    "window_attn_skip_freq": "layer_types", "softmax_type": "",
    "softmax_scale": "query_pre_attn_scalar", "window_rotary_base": "", "embedding_scale": "",
    "window_heads": "", "window_groups": "", "window_channels": "", "value_channels": "v_head_dim",
    "value_scale": "attention_value_scale", "value_norm": "", "keys_are_values": "",
    "sinks_of_windows": "", "embedding_multiplier": "", "residual_multiplier": "",
    "logits_scaling": "", "logit_softcap": "final_logit_softcapping", "rotary_share": "",
    "shared_key_layers": "num_kv_shared_layers", "wide_mlps": "use_double_wide_mlp",
    "layer_input_size": "hidden_size_per_layer_input", "head_gates": "use_head_wise_attn_gate",
    "window_rotary_width": "partial_rotary_factors", "expert_clamps": "swiglu_limits",
    "mlp_clamps": "swiglu_limits_shared", "llama3_low_frequency": "low_freq_factor",
    "llama3_high_frequency": "high_freq_factor",
    "llama3_original_length": "original_max_position_embeddings",
    "layer_scalars": "", "experts_beside_mlp": "enable_moe_block", "short_conv": "",
    "router_epsilon": "",
    "activation_func_clamp_value": "swiglu_limit", "glu_linear_offset": "", "index_topk": "",
    "index_n_heads": "", "index_head_dim": "", "index_rotary_interleaved": "",
    "index_shared": "indexer_types", "index_pool": "index_kpool", "latent_norm_epsilon": "",
    "residual_streams": "hc_mult", "sinkhorn_iterations": "hc_sinkhorn_iters",
    "sinkhorn_epsilon": "hc_eps", "stream_rank": "hc_lowrank",
    "ngram_memory": "ple_layer_ids", "linear_output_gate": "output_gate_type",
    "entry_rates": "compress_rates", "entry_selection": "layer_types", "entry_topk": "index_topk",
    "output_groups": "o_groups", "output_rank": "o_lora_rank", "rotary_width": "qk_rope_head_dim",
    "entry_rotary_base": "compress_rope_theta", "entry_yarn": "rope_scaling",
    "router_scores": "scoring_func", "hashed_layers": "num_hash_layers",
}  # fmt: skip
EMBEDDING_FUNCTION = {
    "position_embedding_type": "", "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor", "use_rope_scaling": "rope_scaling: llama3",
    "rope_scaling_factor": "rope_scaling: factor",
    "rotary_seq_len_interpolation_factor": "rope_scaling: linear, factor",
}  # fmt: skip
LATENT_EPSILON = 1e-6
# the last two are Transformer Engine's projections with a fused norm
LATENT_NORMS = (".q_layernorm", ".kv_layernorm", ".linear_q_up_proj", ".linear_kv_up_proj")


def model_shape(config: TransformerConfig, gpt: GPTModelConfig) -> dict[str, object]:
    """Settings that identify a model, to report how a checkpoint differs.

    Args:
        config: megatron-core's TransformerConfig, for any kind of attention.
        gpt: Settings that it lacks.

    Returns:
        Plain JSON by setting: the shape, and everything else that changes what the weights compute.
    """
    shape = {name: getattr(config, name) for name in MODEL_SHAPE}
    function = {}
    for source, names in ((config, MODEL_FUNCTION), (gpt, EMBEDDING_FUNCTION)):
        for name, alias in names.items():
            if hasattr(source, name):
                function[f"{name} ({alias})" if alias else name] = getattr(source, name)
    activation = getattr(config.activation_func, "__name__", str(config.activation_func))
    function["activation_func"] = activation
    shape |= json.loads(json.dumps(function, default=str))
    shape["vocab_size"] = gpt.vocab_size
    shape["untied_embeddings"] = gpt.untie_embeddings_and_output_weights
    if gpt.mtp_num_layers:
        shape["mtp_num_layers"] = gpt.mtp_num_layers
    if gpt.vision is not None:
        shape["vision_tower"] = True
    return shape


def padded_vocab_size(gpt: GPTModelConfig, tp_size: int) -> int:
    """The vocabulary size, padded so that tensor-parallel ranks have equal shards."""
    assert gpt.vocab_size is not None, "set when the command line is parsed"
    multiple = gpt.make_vocab_size_divisible_by * tp_size
    return -(-gpt.vocab_size // multiple) * multiple


def layer_spec(config: TransformerConfig, transformer_impl: str) -> ModuleSpec:
    """The layer spec: "transformer_engine", or "local" with our core attention for packed rows."""
    if transformer_impl == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = local_layer(config, _core_attention(config), experts=False)
    return _with_extensions(spec, config)


def _block_spec(
    config: TransformerConfig, transformer_impl: str, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of a model chunk, as they are without extensions."""
    if transformer_impl != "transformer_engine":
        return local_block(config, _core_attention(config), vp_stage)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        config, True, normalization=config.normalization, vp_stage=vp_stage
    )


def _core_attention(config: TransformerConfig) -> type[PackedAttention]:
    if config.window_size is not None or config.softmax_type != "vanilla":
        from slime_like.megatron.ops.window_attention import WindowAttention

        return WindowAttention
    if not torch.cuda.is_available():
        return PackedAttention
    from slime_like.megatron.ops.varlen_attention import packed_attention

    return packed_attention(config)


def _with_extensions(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    if hasattr(config, "qk_norm_of_all_heads"):  # a LayerConfig
        from slime_like.megatron.model.norms import add_norms

        add_norms(layer, config)
    if hasattr(config, "window_groups"):  # a SizedConfig
        from slime_like.megatron.model.sized_attention import SizedAttention

        layer.submodules.self_attention.module = SizedAttention
    if getattr(config, "layer_input_size", 0):
        from slime_like.megatron.model.layer_inputs import LayerWithInput

        layer.module = LayerWithInput
    if hasattr(config, "index_topk") and config.multi_latent_attention:  # a SparseConfig
        from slime_like.megatron.model.sparse_attention import use_sparse_attention

        use_sparse_attention(layer)
    if getattr(config, "latent_unrotated", False):
        from slime_like.megatron.model.kimi_delta import UnrotatedLatentAttention

        layer.submodules.self_attention.module = UnrotatedLatentAttention
    if hasattr(config, "stream_rank"):  # a GatedStreamsConfig
        from slime_like.megatron.model.gated_streams import GatedStreamsLayer, without_norm

        layer.module = GatedStreamsLayer
        without_norm(layer)
    elif hasattr(config, "residual_streams"):  # a StreamsConfig
        from slime_like.megatron.model.hyper_connections import HyperConnectedLayer

        layer.module = HyperConnectedLayer
    return layer


def decoder_spec(
    config: TransformerConfig, transformer_impl: str, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of one model chunk: one spec for all layers, or per-layer specs by `moe_layer_freq`
    and `linear_attention_freq`."""
    around_zero = config.layernorm_zero_centered_gamma and transformer_impl == "local"
    wide_mlps = getattr(config, "wide_mlps", False)
    alike = config.num_moe_experts is None and not config.linear_attention_freq
    if alike and not around_zero and not wide_mlps:
        return layer_spec(config, transformer_impl)
    block = _block_spec(config, transformer_impl, vp_stage)
    for layer in block.layer_specs:
        _with_extensions(layer, config)
        mlp = layer.submodules.mlp  # a ModuleSpec, or since 0.18 a functools.partial
        parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        if isinstance(parts, MoESubmodules):
            parts.router = PackedRouter
            if getattr(config, "experts_beside_mlp", False):
                from slime_like.megatron.model.beside_mlp import put_beside_mlp

                put_beside_mlp(layer)
    if around_zero:
        from slime_like.megatron.model.norms import ZeroCenteredRMSNorm

        block.layer_norm = ZeroCenteredRMSNorm
    if wide_mlps:
        from slime_like.megatron.model.layer_inputs import widen_mlps

        widen_mlps(block, config, vp_stage)
    if config.linear_attention_freq:
        from slime_like.megatron.model.delta_specs import insert_delta_nets

        insert_delta_nets(block, config, transformer_impl, vp_stage)
    if getattr(config, "block_pattern", ""):
        from slime_like.megatron.model.mamba import keep_single_blocks

        keep_single_blocks(block, config, vp_stage)
    if hasattr(config, "stream_rank"):
        from slime_like.megatron.model.gated_streams import use_gated_streams

        use_gated_streams(block)
    if hasattr(config, "entry_rates"):
        from slime_like.megatron.model.compressed_attention import use_compressed_attention

        use_compressed_attention(block)
    return block


def build_chunks(
    config: TransformerConfig,
    gpt: GPTModelConfig,
    transformer_impl: str,
    layout: ParallelLayout,
    *,
    value_head: bool = False,
) -> list[LanguageModule]:
    """This rank's model chunks with fp32 parameters; see `to_model_precision` and
    `wrap_for_training`. value_head: build a critic."""
    position: dict[str, object] = {
        "position_embedding_type": gpt.position_embedding_type or "rope",
        "rotary_percent": gpt.rotary_percent or 1.0,
        "rotary_base": gpt.rotary_base or 10000,
        "rope_scaling": gpt.use_rope_scaling,
        "rope_scaling_factor": gpt.rope_scaling_factor or 8.0,
        "seq_len_interpolation_factor": gpt.rotary_seq_len_interpolation_factor,
    }
    chunks = []
    for stage in range(layout.vp_size):
        vp_stage = stage if layout.vp_size > 1 else None
        settings: dict[str, object] = {
            "config": config,
            "transformer_layer_spec": decoder_spec(config, transformer_impl, vp_stage),
            "vocab_size": padded_vocab_size(gpt, layout.tp_size),
            "max_sequence_length": gpt.max_position_embeddings or 0,
            "share_embeddings_and_output_weights": not gpt.untie_embeddings_and_output_weights,
            "parallel_output": True,
            "vp_stage": vp_stage,
            **position,
        }
        ends = {
            "pre_process": layout.is_first_stage and stage == 0,
            "post_process": layout.is_last_stage and stage == layout.vp_size - 1,
        }
        chunk: SeesImages
        if gpt.custom_model_provider_path is not None and not value_head:
            from slime_like.megatron.model.provided import provided_chunk

            path = gpt.custom_model_provider_path
            chunk = provided_chunk(path, base_class(gpt.model_base), settings, **ends)
        else:
            kind = ValueModel if value_head else PolicyModel
            chunk = on_base(kind, base_class(gpt.model_base))(**settings, **ends)
        if gpt.mtp_num_layers and chunk.post_process and not value_head:
            add_prediction_layers(chunk, config, gpt.mtp_num_layers, transformer_impl, vp_stage)
        if gpt.vision is not None:
            add_vision(chunk, gpt.vision, sequence_parallel=config.sequence_parallel)
        if getattr(config, "llama3_original_length", None) and gpt.use_rope_scaling:
            _use_llama3_numbers(chunk.rotary_pos_emb, config, gpt)
        if getattr(config, "expert_clamps", None) or getattr(config, "mlp_clamps", None):
            from slime_like.megatron.model.clamped_mlp import clamp_activations

            clamp_activations(chunk)
        set_latent_epsilon(chunk)
        mark_parameters(chunk)
        if chunk.pre_process and getattr(config, "embedding_scale", 1.0) != 1.0:
            chunk.embedding.register_forward_hook(_scale_embedding)
        if chunk.pre_process and getattr(config, "embedding_multiplier", 1.0) != 1.0:
            chunk.embedding.register_forward_hook(_multiply_embedding)
        if getattr(config, "layer_input_size", 0):
            from slime_like.megatron.model.layer_inputs import add_layer_inputs

            add_layer_inputs(chunk, padded_vocab_size(gpt, layout.tp_size))
        if hasattr(config, "residual_streams"):
            from slime_like.megatron.model.hyper_connections import add_streams

            add_streams(chunk)
        if getattr(config, "ngram_memory", None) is not None:
            from slime_like.megatron.model.ngram_memory import add_tokens

            add_tokens(chunk)
        if getattr(config, "hashed_layers", 0):
            tell_routers_tokens(chunk)
        if torch.cuda.is_available() and not next(chunk.parameters()).is_meta:
            chunk = chunk.to(torch.cuda.current_device())
        chunks.append(chunk)
    return chunks


def add_prediction_layers(
    chunk: LanguageModule,
    config: TransformerConfig,
    count: int,
    transformer_impl: str,
    vp_stage: int | None,
) -> None:
    """Add multi-token prediction layers to the last chunk of a policy."""
    from slime_like.megatron.model.prediction import PredictionLayers, one_layer, prediction_block

    single = one_layer(config)
    block = prediction_block(single, decoder_spec(single, transformer_impl, None))
    chunk.mtp = PredictionLayers(config, block, count, vp_stage)


def set_latent_epsilon(chunk: LanguageModule) -> None:
    """Set the epsilon of MLA's latent norms, which is independent of --norm-epsilon: in
    transformers' DeepseekV3 and Glm4MoeLite it is the default of the norm class, in GLM-5.3 that of
    the other norms."""
    if not chunk.config.multi_latent_attention:
        return
    epsilon = getattr(chunk.config, "latent_norm_epsilon", LATENT_EPSILON)
    for name, module in chunk.named_modules():
        if name.endswith(LATENT_NORMS) and hasattr(module, "eps"):
            module.eps = epsilon


def _use_llama3_numbers(rotary: Any, config: TransformerConfig, gpt: GPTModelConfig) -> None:
    """Scale the frequencies of Llama 3's rotary embedding by the numbers of `config`; megatron-core
    has used those of Llama 3.1."""
    width = 2 * len(rotary.inv_freq)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=rotary.inv_freq.device) / width
    rotary.inv_freq = rotary._apply_scaling(
        1.0 / (gpt.rotary_base or 10000) ** steps,
        factor=gpt.rope_scaling_factor,
        low_freq_factor=config.llama3_low_frequency,
        high_freq_factor=config.llama3_high_frequency,
        original_max_position_embeddings=config.llama3_original_length,
    )


def _scale_embedding(
    module: torch.nn.Module, inputs: object, embedded: torch.Tensor
) -> torch.Tensor:
    """Scale embeddings in their dtype; transformers rounds the scale to it too. A scalar of the
    host is an argument of the kernel and not copied."""
    scale = module.config.embedding_scale  # type: ignore[union-attr]
    return embedded * torch.tensor(scale, dtype=embedded.dtype)


def _multiply_embedding(
    module: torch.nn.Module, inputs: object, embedded: torch.Tensor
) -> torch.Tensor:
    multiplier: float = module.config.embedding_multiplier  # type: ignore[union-attr, assignment]
    return embedded * multiplier


def mark_parameters(chunk: LanguageModule) -> None:
    """Correct which parameters count as tensor-parallel. Of the others the gradient norm takes the
    first tensor-parallel rank's, and of these every rank's.

    Attention sinks are per head, and unmarked. Parameters of experts are complete on their rank,
    also those that Transformer Engine leaves unmarked, since the dispatcher communicates and not
    the layer; under sequence parallelism the gradients of different experts' biases would also be
    summed. (The output of such an expert needs no reduction; megatron-core adds the bias in place.)
    Transformer Engine marks the weights of all its linear layers, also of those that every rank
    has whole (the down-projections of latent attention): the norm would count them once per rank.
    """
    for name, module in chunk.named_modules():
        if ".experts." not in name and getattr(module, "parallel_mode", "") is None:
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = False
    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True
        elif ".experts." in name:
            parameter.tensor_model_parallel = True
            if ".bias" in name:
                parameter.sequence_parallel = False
    for module in chunk.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True


def to_model_precision(
    chunks: Sequence[LanguageModule], config: TransformerConfig
) -> list[MegatronModule]:
    """Wrap chunks for bf16 and fp16; fp32 chunks are returned as they are. fp64 is for the parity
    matrix."""
    if config.bf16 or config.fp16:
        return [HalfPrecisionModule(config, chunk) for chunk in chunks]
    if config.params_dtype == torch.float64:  # megatron-core's norms and routers ignore it
        return [chunk.double() for chunk in chunks]
    return list(chunks)


def wrap_for_training(
    chunks: Sequence[MegatronModule], config: TransformerConfig, ddp: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Gradient buffers and data-parallel reduction. Only the first chunk overlaps in buckets, as in
    Megatron-LM."""
    return [
        DistributedDataParallel(
            config=config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]
