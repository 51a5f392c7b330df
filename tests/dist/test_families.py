"""Every registered family, on a tiny model: logits and all gradients against transformers' class in
float64 and float32, packed rows against sequences alone, and the weights back bit by bit."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from arguments.hf.model import read_hf_model
from benchmarks.parity.cells import RECOMPUTE
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import ROOT, family_of, make_tiny_model, published_tensors
from slime_like.megatron.model.gpt import _scale_embedding
from slime_like.megatron.model.policy import logits_of
from slime_like.megatron.ops.attention import packed_rows
from slime_like.weights.families import model_families
from slime_like.weights.untrained import untrained_prefixes, untrained_weights
from tests.dist import convert_worker
from tests.dist.family_layouts import CP2, EP2, EXACT, PP2, TP2, FamilyLayouts
from tests.dist.float64 import WithoutFloat32

T = TypeVar("T")
LENGTHS = (29, 48, 5)
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "original_max_position_embeddings": 16,
}
# further models of a family, by keys of config.json
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5-Air": ("Glm4MoeForCausalLM", {"use_qk_norm": False}),
    "YaRN": ("Qwen3ForCausalLM", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "YaRN with another scale": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                **YARN,
                "attention_factor": 0.8,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    # of a part of each head, as for a million tokens; and of pairs
    "Qwen3-Next with YaRN": (
        "Qwen3NextForCausalLM",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5, "attention_factor": 1.2}},
    ),
    "Qwen3.5 with YaRN": (
        "Qwen3_5ForCausalLM",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.25}},
    ),
    "GLM-4 with YaRN": (
        "Glm4ForCausalLM",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5, "factor": 3.0}},
    ),
    "ERNIE 4.5 with YaRN": ("Ernie4_5ForCausalLM", {"rope_parameters": YARN}),
    "windows in some layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "windows by layer": (
        "MinistralForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    # of which every second layer takes the choice of the one before it
    "GLM-5.2": ("GlmMoeDsaForCausalLM", {"index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "DeepSeek-V3.2 with YaRN": (
        "DeepseekV32ForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "Olmo-3 with YaRN": (
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "EXAONE-4-1.2B": (
        "Exaone4ForCausalLM",
        {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "Kimi-Linear with compressed queries": (
        "KimiLinearForCausalLM",
        {
            **{"linear_num_heads": 6, "linear_head_dim": 7, "linear_conv_kernel_dim": 3},
            **{"q_lora_rank": 20, "num_attention_heads": 2, "num_key_value_heads": 2},
            "layer_types": [*["linear_attention"] * 2, "full_attention"],
        },
    ),
    "Nemotron-H without experts": (
        "NemotronHForCausalLM",
        {
            **{"mamba_num_heads": 6, "mamba_head_dim": 7, "n_groups": 2, "ssm_state_size": 3},
            # most steps are of this size
            **{"conv_kernel": 3, "time_step_min": 1.2, "layer_norm_epsilon": 1e-4},
            "layer_types": ["mlp", "full_attention", "linear_attention"],
        },
    ),
    "Nemotron-3-Super": (
        "NemotronHForCausalLM",
        {
            **{"num_hidden_layers": 4, "n_group": 1, "topk_group": 1, "moe_latent_size": 20},
        },
    ),
    # every other way of its blocks: decays without a bound, an indexer of two layers, 4 streams
    "GLM-5.3 with a shared indexer": (
        "Glm5NextForConditionalGeneration",
        {
            **{"linear_num_heads": 6, "linear_head_dim": 7, "linear_conv_kernel_dim": 3},
            **{"linear_lower_bound": None, "num_attention_heads": 2, "num_key_value_heads": 2},
            **{"index_topk_freq": 3, "index_skip_topk_offset": 1, "index_topk": 6},
            **{"index_kpool": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20, "swiglu_limit": 0.3},
            "layer_types": [*["indexed_attention"] * 2, "linear_attention"],
        },
    ),
    # keys alone in place of pools, all of a head rotated
    "Qwen3.8 without pools": (
        "Qwen4ExpForConditionalGeneration",
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5},
            **{"hc_count": 2, "hc_lowrank": 5, "norm_topk_prob": False, "indexer_head_dim": 18},
            **{"indexer_budget": 5, "indexer_compress_ratio": 1, "rms_norm_eps": 1e-3},
            # a memory of single heads that crosses no token 7, with gates of the other kind
            **{"ple_layer_ids": [2], "ngram_size": 4, "heads_per_ngram": 1, "eos_token_id": [7, 9]},
            **{
                "ple_embed_dim": 9,
                "ple_conv_kernel_size": 4,
                "ngram_vocab_size_base": 5,
                "seed": 6,
            },
            **{"split_ngram_parts": 1, "output_gate_type": "sigmoid"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
        },
    ),
    # plain rotary embeddings, entries of two tokens, three groups of heads, no hashed layer
    "DeepSeek-V4 with its own values": (
        "DeepseekV4ForCausalLM",
        {
            **{"num_attention_heads": 6, "o_groups": 6, "o_lora_rank": 3, "sliding_window": 3},
            **{
                "compress_rates": {
                    "compressed_sparse_attention": 2,
                    "heavily_compressed_attention": 5,
                }
            },
            **{"index_topk": 2, "hc_mult": 2, "num_experts_per_tok": 2, "head_dim": 10},
            **{"partial_rotary_factor": 0.4, "swiglu_limit": 0.3, "compress_rope_theta": 300.0},
            **{"rope_parameters": None, "mlp_layer_types": ["moe"] * 3},
        },
    ),
    "Gemma 4 with its own values": (
        "Gemma4ForCausalLM",
        {
            **{"attention_k_eq_v": False, "global_head_dim": 12, "final_logit_softcapping": None},
            **{"num_global_key_value_heads": None, "tie_word_embeddings": False},
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Gemma 4 with experts": (
        "Gemma4ForCausalLM",
        {
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2},
            "moe_intermediate_size": 20,
        },
    ),
    "Gemma 4 with experts and a tower": (
        "Gemma4ForConditionalGeneration",
        {
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3},
            "moe_intermediate_size": 12,
        },
    ),
    # inputs of layers, and two layers with wider MLPs that share the keys of layers 2 and 3
    "Gemma 4 E2B": (
        "Gemma4ForCausalLM",
        {
            **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 7, "attention_k_eq_v": False},
            "vocab_size_per_layer_input": 101,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    # more inputs than three hidden states hold, and shared keys that are values too
    "Gemma 4 E4B with a tower": (
        "Gemma4ForConditionalGeneration",
        {
            **{"num_hidden_layers": 6, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 28, "vocab_size_per_layer_input": 101},
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        },
    ),
    # as many heads in all layers, half of them rotated where there is a window, a dense layer amid
    # others, clamps of shared experts alone
    "Step-3.7 with its own values": (
        "Step3p7ForConditionalGeneration",
        {
            **{"num_sliding_attention_heads": None, "query_pre_attn_scalar": None},
            **{"swiglu_limits": None, "swiglu_limits_shared": [0.0, 0.1, 0.05]},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {
                    **{"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
                },
            },
        },
    ),
    "LFM2 with YaRN": ("Lfm2ForCausalLM", {"rope_parameters": YARN, "conv_L_cache": 2}),
    "Granite 4 with experts": (
        "GraniteMoeHybridForCausalLM",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": None},
            **{"tie_word_embeddings": True, "layer_types": ["full_attention"] * 3},
        },
    ),
    "Granite 4 with Mamba-2": (
        "GraniteMoeHybridForCausalLM",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "GraniteMoeShared without a shared expert": (
        "GraniteMoeSharedForCausalLM",
        {"shared_intermediate_size": 0},
    ),
    "GLM-4-9B": ("Glm4ForCausalLM", {"attention_bias": False, "tie_word_embeddings": True}),
}
# Not against transformers: too few heads of the indexer for distinct scores, since ReLU makes many
# of them 0. transformers' topk breaks such ties in its own order, ours by position.
TIES = {"tied index scores": ("DeepseekV32ForCausalLM", {"index_n_heads": 2})}
CASES = {**{name: (name, {}) for name in model_families.names()}, **VARIANTS}
# relative to a tensor's norm; see `apart`. In float32 three times the rounding of transformers is
# allowed where that is more: how much a processor rounds depends on its instructions.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
# a number for each head or of a whole layer, whose gradient is a sum over all tokens of terms that
# nearly cancel: ten times as far
CANCELLING = ("A_log", "dt_bias", "hc_attn_scale", "hc_ffn_scale")
UNTRAINED = (
    "e_score_correction_bias",
    ".indexer.",
    "layer_scalar",
)  # parts of names of what has no gradient


def objective(logits: Sequence[Tensor], coefficients: Sequence[Tensor]) -> Tensor:
    """One number, of which every logit has its own share."""
    return sum(
        ((x * c).sum() for x, c in zip(logits, coefficients, strict=True)), torch.tensor(0.0)
    )


def logits_of_text(model: Any, tokens: Tensor) -> Tensor:
    """[L, vocab] of one sequence, by transformers' model."""
    return model(tokens[None]).logits[0]


def of_transformers(
    model: Any,
    sequences: Sequence[T],
    coefficients: Sequence[Tensor],
    folder: Path,
    logits_of: Callable[[Any, T], Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each sequence, and gradients by their names in files."""
    logits = [logits_of(model, sequence) for sequence in sequences]
    objective(logits, coefficients).backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, own in zip(model.parameters(), gradients.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if parameter.grad is None else parameter.grad)
    gradients.save_pretrained(folder)
    model.zero_grad()
    saved = published_tensors(type(model).__name__, load_file(folder / "model.safetensors"))
    return [x.detach() for x in logits], trained(saved)


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if not any(part in n for part in UNTRAINED)}


def read(folder: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Less what a run does not read, as vision towers."""
    other = untrained_prefixes(read_hf_model(folder))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(other)}


TP2_EP2 = f"{TP2} {EP2} --expert-tensor-parallel-size 1"
REST = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
# by number of processes: (of `CASES`, flags)
CELLS = {
    2: [
        ("Glm4MoeForCausalLM", TP2_EP2),
        ("MistralForCausalLM", TP2),
        ("Gemma3ForCausalLM", TP2),
        ("Gemma3ForCausalLM", f"{CP2} {RECOMPUTE['recompute']}"),
        ("GptOssForCausalLM", f"{CP2} {EP2}"),
        ("GptOssForCausalLM", TP2_EP2),
        ("GptOssForCausalLM", "--micro-batch-size 1"),  # DP2
        ("windows in some layers", CP2),
        ("tied index scores", f"{CP2} {EP2}"),
        ("Glm4MoeForCausalLM", f"{CP2} {EP2}"),
        ("Glm4ForCausalLM", TP2),
        ("Olmo-3 with YaRN", TP2),
        ("Olmo2ForCausalLM", CP2),
        ("Exaone4ForCausalLM", TP2),
        ("Phi3ForCausalLM", TP2),
        ("GraniteForCausalLM", TP2),
        ("GraniteForCausalLM", f"{CP2} {RECOMPUTE['recompute']}"),
        ("GraniteMoeSharedForCausalLM", TP2_EP2),
        ("GraniteMoeForCausalLM", f"{CP2} {EP2}"),
        ("Granite 4 with experts", "--micro-batch-size 1"),  # DP2
        ("Granite 4 with Mamba-2", f"{EP2} {RECOMPUTE['recompute']}"),
        ("Granite 4 with Mamba-2", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
        ("Gemma4ForCausalLM", TP2),
        ("Gemma4ForCausalLM", f"{CP2} {RECOMPUTE['recompute']}"),
        ("Gemma 4 with its own values", "--tensor-model-parallel-size 2"),
        ("Gemma 4 with experts", TP2_EP2),
        ("Gemma 4 with experts", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("Gemma 4 with experts", "--micro-batch-size 1"),  # DP2
        (
            "Gemma 4 with experts",
            f"{PP2} --recompute-granularity selective --recompute-modules moe",
        ),
        ("Gemma 4 E2B", TP2),
        ("Gemma 4 E2B", f"{CP2} {RECOMPUTE['recompute']}"),
        ("Gemma 4 E2B", "--tensor-model-parallel-size 2"),
        ("Gemma 4 E2B", f"--micro-batch-size 1 {REST}"),  # DP2
        ("Gemma 4 E2B", f"{PP2} --decoder-last-pipeline-num-layers 4 {RECOMPUTE['recompute']}"),
        (
            "Gemma 4 E2B",
            f"{PP2} --pipeline-model-parallel-layout E|t|t|t*4L "
            "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
        ),
        ("Lfm2ForCausalLM", TP2),
        ("Lfm2ForCausalLM", f"{CP2} {RECOMPUTE['recompute']}"),
        ("Lfm2MoeForCausalLM", TP2_EP2),
        ("Lfm2MoeForCausalLM", f"{CP2} {EP2}"),
        ("Lfm2MoeForCausalLM", "--micro-batch-size 1"),  # DP2
        ("MiMoV2FlashForCausalLM", TP2_EP2),
        ("MiMoV2FlashForCausalLM", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("MiMoV2FlashForCausalLM", "--micro-batch-size 1"),  # DP2
        ("Step3p7ForConditionalGeneration", TP2_EP2),
        ("Step3p7ForConditionalGeneration", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("Step3p7ForConditionalGeneration", "--micro-batch-size 1"),  # DP2
        (
            "Step3p7ForConditionalGeneration",
            f"{PP2} --recompute-granularity selective --recompute-modules core_attn layernorm moe",
        ),
        ("Step-3.7 with its own values", f"{TP2_EP2} {RECOMPUTE['recompute']}"),
        ("Step-3.7 with its own values", f"{CP2} {EP2}"),
        ("Step-3.7 with its own values", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
        ("Qwen3VLMoeForConditionalGeneration", TP2_EP2),
        ("Mistral3ForConditionalGeneration", CP2),
        ("Glm4ForCausalLM", f"{CP2} {RECOMPUTE['recompute']}"),
        ("YaRN", TP2),
        ("YaRN", CP2),
        ("Qwen3-Next with YaRN", TP2_EP2),
        ("GLM-4 with YaRN", CP2),
        ("SeedOssForCausalLM", TP2),
        ("SmolLM3ForCausalLM", CP2),
        ("MiniMaxM2ForCausalLM", TP2_EP2),
        ("MiniMaxM2ForCausalLM", f"{CP2} {EP2}"),
        ("Qwen3NextForCausalLM", TP2_EP2),
        ("Qwen3NextForCausalLM", "--micro-batch-size 1"),  # DP2
        ("Qwen3_5ForConditionalGeneration", CP2),
        ("Qwen3_5ForConditionalGeneration", TP2),
        # norms within the blocks, whose gradients each rank has a part of
        ("Qwen3_5ForConditionalGeneration", "--tensor-model-parallel-size 2"),
        ("Nemotron-H without experts", "--tensor-model-parallel-size 2"),
        ("KimiLinearForCausalLM", TP2_EP2),
        ("KimiLinearForCausalLM", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("KimiLinearForCausalLM", "--micro-batch-size 1"),  # DP2
        ("Glm5NextForConditionalGeneration", TP2_EP2),
        ("Glm5NextForConditionalGeneration", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("Glm5NextForConditionalGeneration", "--micro-batch-size 1"),  # DP2
        (
            "Glm5NextForConditionalGeneration",
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
        ),
        ("GLM-5.3 with a shared indexer", f"{TP2_EP2} {RECOMPUTE['recompute']}"),
        # DP2
        (
            "GLM-5.3 with a shared indexer",
            "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
        ),
        ("Qwen4ExpForConditionalGeneration", TP2_EP2),
        ("Qwen4ExpForConditionalGeneration", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("Qwen4ExpForConditionalGeneration", "--micro-batch-size 1"),  # DP2
        (
            "Qwen4ExpForConditionalGeneration",
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
        ),
        ("Qwen3.8 without pools", f"{TP2_EP2} {RECOMPUTE['recompute']}"),
        ("Qwen3.8 without pools", f"{CP2} {EP2}"),
        # DP2
        (
            "Qwen3.8 without pools",
            "--recompute-granularity selective --recompute-modules core_attn layernorm",
        ),
        ("DeepseekV4ForCausalLM", TP2_EP2),
        ("DeepseekV4ForCausalLM", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("DeepseekV4ForCausalLM", "--micro-batch-size 1"),  # DP2
        ("DeepseekV4ForCausalLM", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
        (
            "DeepseekV4ForCausalLM",
            f"{PP2} --recompute-granularity selective --recompute-modules moe",
        ),
        ("DeepSeek-V4 with its own values", f"{TP2_EP2} {RECOMPUTE['recompute']}"),
        ("DeepSeek-V4 with its own values", f"{CP2} {EP2}"),
        # DP2
        (
            "DeepSeek-V4 with its own values",
            "--recompute-granularity selective --recompute-modules core_attn layernorm moe",
        ),
        ("NemotronHForCausalLM", TP2_EP2),
        ("NemotronHForCausalLM", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("NemotronHForCausalLM", "--micro-batch-size 1"),  # DP2
        ("Nemotron-3-Super", TP2_EP2),
        ("Nemotron-3-Super", f"{CP2} {EP2}"),
        ("Nemotron-3-Super", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
        # DP2, with parts of layers that are not there
        (
            "NemotronHForCausalLM",
            "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
        ),
        ("Nemotron-H without experts", TP2),
        ("Nemotron-H without experts", f"{CP2} {RECOMPUTE['recompute']}"),
        ("DeepseekV32ForCausalLM", TP2_EP2),
        ("DeepseekV32ForCausalLM", f"{CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("GLM-5.2", f"{TP2_EP2} {RECOMPUTE['recompute']}"),
        # DP2, and attention computed again in backward
        (
            "GLM-5.2",
            "--micro-batch-size 1 --recompute-granularity selective --recompute-modules core_attn",
        ),
    ],
    4: [
        ("Glm4MoeForCausalLM", f"{PP2} {EP2}"),
        ("Gemma3ForCausalLM", f"{PP2} {TP2}"),
        ("Olmo3ForCausalLM", f"{PP2} {CP2} {RECOMPUTE['recompute']}"),
        ("GptOssForCausalLM", f"{PP2} {EP2} {RECOMPUTE['recompute']}"),
        ("GraniteForCausalLM", f"{PP2} {TP2}"),
        ("GraniteMoeHybridForCausalLM", f"{PP2} {CP2}"),
        ("GraniteMoeSharedForCausalLM", f"{PP2} {EP2}"),
        ("Granite 4 with Mamba-2", f"{PP2} {EP2}"),
        ("Gemma4ForCausalLM", f"{PP2} {TP2}"),
        ("Gemma 4 with its own values", f"{PP2} {CP2}"),
        ("Gemma 4 with experts", f"{PP2} {TP2_EP2}"),
        ("Gemma 4 E2B", f"{PP2} {TP2} --decoder-first-pipeline-num-layers 1"),
        ("Gemma 4 E2B", f"{PP2} {CP2} --pipeline-model-parallel-layout Et|t|t*4|L"),
        ("Lfm2ForCausalLM", f"{PP2} {TP2}"),
        ("Lfm2MoeForCausalLM", f"{PP2} {EP2}"),
        ("Lfm2MoeForCausalLM", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("MiMoV2FlashForCausalLM", f"{PP2} {EP2}"),
        ("MiMoV2FlashForCausalLM", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("MiMoV2FlashForCausalLM", f"{PP2} {TP2_EP2}"),
        ("Step3p7ForConditionalGeneration", f"{PP2} {EP2}"),
        ("Step3p7ForConditionalGeneration", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("Step-3.7 with its own values", f"{PP2} {TP2_EP2}"),
        ("GptOssForCausalLM", f"{TP2_EP2} {CP2}"),
        ("windows in some layers", f"{PP2} {CP2} {RECOMPUTE['recompute']}"),
        ("Glm4ForCausalLM", f"{PP2} --tensor-model-parallel-size 2"),
        ("SmolLM3ForCausalLM", f"{PP2} {TP2} {RECOMPUTE['recompute']}"),
        ("MiniMaxM2ForCausalLM", f"{PP2} {TP2} {RECOMPUTE['recompute']}"),
        ("Qwen3NextForCausalLM", f"{PP2} {EP2}"),
        ("Qwen3_5MoeForConditionalGeneration", f"{TP2} {PP2}"),
        ("Qwen3NextForCausalLM", f"{TP2} {CP2} {EP2} {RECOMPUTE['recompute']}"),
        ("KimiLinearForCausalLM", f"{PP2} {EP2}"),
        ("KimiLinearForCausalLM", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("KimiLinearForCausalLM", f"{PP2} {TP2_EP2}"),
        ("Glm5NextForConditionalGeneration", f"{PP2} {EP2}"),
        ("Glm5NextForConditionalGeneration", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("Glm5NextForConditionalGeneration", f"{PP2} {TP2_EP2}"),
        ("Qwen4ExpForConditionalGeneration", f"{PP2} {EP2}"),
        ("Qwen4ExpForConditionalGeneration", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("Qwen4ExpForConditionalGeneration", f"{PP2} {TP2_EP2}"),
        ("DeepseekV4ForCausalLM", f"{PP2} {EP2}"),
        ("DeepseekV4ForCausalLM", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("DeepseekV4ForCausalLM", f"{PP2} {TP2_EP2}"),
        ("NemotronHForCausalLM", f"{PP2} {EP2}"),
        ("NemotronHForCausalLM", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
        ("Nemotron-3-Super", f"{PP2} {TP2_EP2}"),
        ("DeepseekV32ForCausalLM", f"{PP2} {EP2}"),
        ("GLM-5.2", f"{PP2} {TP2_EP2}"),
        ("GLM-5.2", f"{TP2_EP2} {CP2} {RECOMPUTE['recompute']}"),
    ],
}
# what benchmarks/families_table.py runs of every family, by number of processes
OF_EVERY_DENSE = {2: [TP2, CP2, "--micro-batch-size 1"], 4: [f"{TP2} {PP2}"]}
OF_EVERY_EXPERTS = {
    2: [TP2_EP2, f"{CP2} {EP2}", "--micro-batch-size 1"],
    4: [f"{PP2} {EP2}"],
}
# with pipeline parallelism, of cases whose last layers share keys
LAST_TOGETHER = dict.fromkeys(
    ("Gemma 4 E2B", "Gemma 4 E4B with a tower"), "--decoder-last-pipeline-num-layers 4"
)
# of cases that tensor and context parallelism cannot cut
UNCUT = ("Granite 4 with Mamba-2",)
OF_EVERY_UNCUT = {2: [EP2, "--micro-batch-size 1", PP2], 4: [f"{PP2} {EP2}"]}
IN_MAKE_TEST = [
    ("Qwen3NextForCausalLM", f"{CP2} {EP2}"),
    ("Qwen3NextForCausalLM", f"{PP2} {REST}"),  # two layers on each stage
]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> FamilyLayouts:
    return family_layouts(tmp_path_factory.mktemp("models"))


def family_layouts(folder: Path) -> FamilyLayouts:
    """Of the tiny models of `CASES`, with four layers or those of the case."""

    def make(family: str, folder: Path) -> None:
        like, changes = (CASES | TIES)[family]
        changes = {"num_hidden_layers": 4, **changes}
        if "mlp_layer_types" in changes:
            last = changes["mlp_layer_types"][-1]
            changes = changes | {"mlp_layer_types": [*changes["mlp_layer_types"], last]}
        if len(changes.get("layer_types", [])) == 3:
            changes = changes | {"layer_types": [*changes["layer_types"], "full_attention"]}
        make_tiny_model(like, folder, **changes)

    # the norm megatron-core takes in float32; of it a parameter that is cut is easily left out
    limits = {**EXACT, "grad_norm": 1e-6}
    return FamilyLayouts(folder, make, lambda family: "", limits, timeout_s=850)


def test_a_layout_gives_the_numbers_of_one_process(layouts: FamilyLayouts, tmp_path: Path) -> None:
    layouts.check(2, IN_MAKE_TEST, tmp_path)


def test_a_network_with_experts_is_freed(layouts: FamilyLayouts, tmp_path: Path) -> None:
    """And with it its process groups, whose threads would slow down all that follows."""
    layouts.make("Glm4MoeForCausalLM", tmp_path / "model")
    worker = "tests.dist.families_worker:layers_left"
    arguments = {"folder": str(tmp_path / "model")}
    assert run_ranks(worker, 1, tmp_path / "run", arguments, timeout_s=120) == [0]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", CELLS)
def test_further_layouts(layouts: FamilyLayouts, tmp_path: Path, ranks: int) -> None:
    layouts.check(ranks, CELLS[ranks], tmp_path)


class Ours:
    """megatron-core's network of the model in `folder`."""

    def __init__(
        self, folder: Path, layout: Any, dtype: torch.dtype, model_base: str = "auto"
    ) -> None:
        self.layout, self.folder = layout, str(folder)
        self.chunks, self.hf, self.gpt = convert_worker.build(
            self.folder, layout, dtype, model_base=model_base
        )
        convert_worker.load_hf_weights(self.chunks, self.folder, **self.model)
        if dtype == torch.float64:
            convert_worker.in_float64(self.chunks)

    @property
    def model(self) -> dict[str, Any]:
        return {"hf": self.hf, "gpt": self.gpt, "layout": self.layout}

    def exported(self) -> dict[str, Tensor]:
        return dict(convert_worker.HfExport(self.chunks, **self.model).stream())

    def logits(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Of sequences packed into one row."""
        (chunk,), lengths = self.chunks, [len(row) for row in tokens]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        hidden = chunk(
            torch.cat(list(tokens))[None], positions, None, packed_seq_params=packed_rows(ends)
        )
        rows = logits_of(chunk, hidden)[0]
        return list(rows[:, : self.hf.gpt["vocab_size"]].split(lengths))

    def gradients(self) -> dict[str, Tensor]:
        """By their names in files; those of the parameters are spent."""
        parameters = [p for p in self.chunks[0].parameters() if p.requires_grad]
        weights = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.data.copy_(p.grad)
        found = {name: tensor.clone() for name, tensor in self.exported().items()}
        for p, weight in zip(parameters, weights, strict=True):
            p.data.copy_(weight)
            p.grad = None
        return trained(found)


def apart(
    found: dict[str, Tensor], expected: dict[str, Tensor], unused: tuple[str, ...] = ()
) -> dict[str, float]:
    """The difference of each tensor, relative to its norm.

    Args:
        unused: Parts of the names of tensors that may be 0, and then have to be.
    """
    assert found.keys() == expected.keys()
    zeros = [name for name, tensor in expected.items() if not tensor.any()]
    known = [name for name in zeros if any(part in name for part in unused)]
    zeros = [name for name in zeros if name not in known or found[name].any()]
    assert not zeros, "they would agree with anything"
    return {
        n: float((found[n] - t).norm() / t.norm().clamp(min=1e-300))
        / (10 if n.endswith(CANCELLING) else 1)
        for n, t in expected.items()
    }


def test_the_family_of_the_guide(alone: Any, tmp_path: Path) -> None:
    """The code of docs/en/extend.md, taken from the page, shows what every registered family does."""
    page = (ROOT / "docs/en/extend.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Model family$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) < 60
    exec(compile(code, "docs/en/extend.md", "exec"), {})
    try:
        check_against_transformers("stablelm-2-1_6b", {}, alone, tmp_path)
    finally:
        model_families.remove("StableLmForCausalLM")


@pytest.mark.parametrize("name", CASES)
def test_against_transformers(name: str, alone: Any, tmp_path: Path) -> None:
    check_against_transformers(*CASES[name], alone, tmp_path)


def check_against_transformers(
    like: str, changes: dict[str, Any], alone: Any, tmp_path: Path
) -> None:
    for dtype, found in measure(like, changes, alone, tmp_path).items():
        for differences in (found.of_transformers, found.of_alone):
            far = {
                name: d
                for name, d in differences.items()
                if d > max(LIMITS[dtype], 3 * found.rounding[name])
            }
            assert not far, (dtype, far)


@dataclass(frozen=True)
class Measured:
    """Differences by tensor, relative to its norm."""

    of_transformers: dict[str, float]  # logits and gradients
    of_alone: dict[str, float]  # the logits of packed rows from those of each sequence alone
    rounding: dict[str, float]  # transformers' float32 from its float64, on this processor


def measure(
    like: str, changes: dict[str, Any], alone: Any, folder: Path
) -> dict[torch.dtype, Measured]:
    """A tiny model of a family, written into an empty folder, in float64 and in float32."""
    reference = make_tiny_model(like, folder / "model", **changes)
    return measure_model(reference, folder / "model", alone, folder / "grads", *reversed(LIMITS))


def measure_model(
    reference: Any,
    folder: Path,
    alone: Any,
    scratch: Path,
    *dtypes: torch.dtype,
    unused: tuple[str, ...] = (),
) -> dict[torch.dtype, Measured]:
    """transformers' model against the one saved in `folder`, in float64 first. That the exported
    weights are the file's, bit by bit, is asserted.

    Args:
        unused: See `apart`.
    """
    generator = torch.Generator().manual_seed(3)
    vocab = reference.config.get_text_config().vocab_size
    tokens = [torch.randint(vocab, (n,), generator=generator) for n in LENGTHS]
    shares = [torch.randn(n, vocab, generator=generator, dtype=torch.float64) for n in LENGTHS]
    exact: dict[str, Tensor] = {}
    measured = {}
    for dtype in dtypes:
        coefficients = [c.to(dtype) for c in shares]
        with WithoutFloat32() if dtype == torch.float64 else nullcontext():
            theirs = type(reference)(reference.config).to(dtype).eval()
            theirs.load_state_dict(reference.state_dict())
            exact_embedding_scale(theirs, dtype)
            ours = Ours(folder, alone, dtype)
            stored = read(ours.folder, convert_worker.stored_weights(ours.folder))
            exported = ours.exported()
            assert exported.keys() == stored.keys()
            assert all(torch.equal(exported[n], t.to(dtype)) for n, t in stored.items())
            logits, expected = of_transformers(
                theirs, tokens, coefficients, scratch, logits_of_text
            )
            packed = ours.logits(tokens)
            objective(packed, coefficients).backward()
            singly = torch.cat([ours.logits([row])[0] for row in tokens]).detach()
        full = torch.cat(packed).detach()
        others = {"logits": torch.cat(logits), **read(ours.folder, expected)}
        exact = exact or others
        measured[dtype] = Measured(
            apart({"logits": full, **ours.gradients()}, others, unused),
            apart({"logits": full}, {"logits": singly}),
            apart(others, exact, unused),
        )
    return measured


def exact_embedding_scale(model: Any, dtype: torch.dtype) -> None:
    """transformers keeps the scale of Gemma's embeddings in float32, also in a model of float64."""
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64).to(
                torch.promote_types(dtype, torch.float32)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it(dtype: torch.dtype) -> None:
    """Of a hidden size whose root is no short number: of 64 it is 8 in every type."""
    theirs = Gemma3TextScaledWordEmbedding(7, 44, 0, embed_scale=44**0.5).to(dtype)
    holder = SimpleNamespace(config=SimpleNamespace(embedding_scale=44**0.5))
    tokens = torch.arange(7)
    ours = _scale_embedding(holder, None, theirs.weight[tokens])  # type: ignore[arg-type]
    assert torch.equal(ours, theirs(tokens))


def test_experts_in_one_tensor(alone: Any, tmp_path: Path) -> None:
    """As the published files of Qwen3.5 have them: the same model."""
    folder = tmp_path / "model"
    make_tiny_model("Qwen3_5MoeForConditionalGeneration", folder)
    each = Ours(folder, alone, torch.float32).exported()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        block = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{e}.{part}.weight") for e in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    save_file(tensors, folder / "model.safetensors")
    fused = Ours(folder, alone, torch.float32).exported()
    assert fused.keys() == each.keys() and all(torch.equal(fused[n], each[n]) for n in each)


def test_clamps_of_layers(alone: Any, tmp_path: Path) -> None:
    """They change what a tiny model of Step's computes, or agreement about it would say nothing;
    and an MLP with one is cut in checkpoints as others are."""
    name = "Step3p7ForConditionalGeneration"
    none: dict[str, Any] = {"swiglu_limits": None}
    tokens = [torch.arange(40)]
    found = {}
    for case, changes in {
        "both": {},
        "shared": none,
        "neither": {**none, "swiglu_limits_shared": None},
    }.items():
        make_tiny_model(name, tmp_path / case, **changes)
        ours = Ours(tmp_path / case, alone, torch.float32)
        state = ours.chunks[0].sharded_state_dict()
        cut = {key: type(part).__name__ for key, part in state.items() if "fc1.weight" in key}
        found[case] = (cut, ours.logits(tokens)[0].detach())
    (cut, both), (_, shared), (plain, neither) = found.values()
    assert cut == plain and set(cut.values()) == {"ShardedTensorFactory"}
    assert float((both - shared).abs().max()) > 1e-3
    assert float((shared - neither).abs().max()) > 1e-3


def test_kimi_linear_as_transformers_saves_it(alone: Any, tmp_path: Path) -> None:
    """Dense layers have the name of those with experts; the same model."""
    folder = tmp_path / "model"
    make_tiny_model("KimiLinearForCausalLM", folder)
    published = Ours(folder, alone, torch.float32).exported()
    tensors = load_file(folder / "model.safetensors")
    saved = {name.replace(".0.mlp.", ".0.block_sparse_moe."): t for name, t in tensors.items()}
    assert len(saved.keys() - tensors.keys()) == 3
    save_file(saved, folder / "model.safetensors")
    other = Ours(folder, alone, torch.float32).exported()
    assert other.keys() == published.keys()
    assert all(torch.equal(other[n], published[n]) for n in published)


def test_what_a_memory_of_ngrams_is_hashed_by(alone: Any, tmp_path: Path) -> None:
    """A file may leave it out, since it follows from config.json; another one is no silent change
    of the rows that are read."""
    folder = tmp_path / "model"
    make_tiny_model("Qwen4ExpForCausalLM", folder)
    own = Ours(folder, alone, torch.float32).exported()
    tensors = load_file(folder / "model.safetensors")
    (name,) = [n for n in tensors if n.endswith("layers.2.ple.ple_embedding.layer_multipliers")]
    numbers = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    other = Ours(folder, alone, torch.float32).exported()
    assert all(torch.equal(own[n], other[n]) for n in own)
    numbers[1] += 2
    save_file({**tensors, name: numbers}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is not what follows from config.json"):
        Ours(folder, alone, torch.float32)


@pytest.mark.parametrize("inner", [24, 32, 16])
def test_experts_in_either_order(alone: Any, tmp_path: Path, inner: int) -> None:
    """Qwen3-VL-MoE's, as its publisher and as transformers have them: the same model, also where
    one of the two tensors is square."""
    folder = tmp_path / "model"
    name = "Qwen3VLMoeForConditionalGeneration"
    make_tiny_model(name, folder, moe_intermediate_size=inner)
    published = Ours(folder, alone, torch.float32).exported()
    tensors = load_file(folder / "model.safetensors")
    save_file(published_tensors(name, tensors), folder / "model.safetensors")
    other = Ours(folder, alone, torch.float32).exported()
    changed = [
        n
        for n, t in load_file(folder / "model.safetensors").items()
        if n in other and not t.equal(other[n])
    ]
    assert len(changed) == 4, "gate_up_proj and down_proj of the two layers with experts"
    assert other.keys() == published.keys()
    assert all(torch.equal(other[n], published[n]) for n in published)


@pytest.mark.parametrize("predicting", [None, 1])
def test_experts_of_prediction_layers_in_one_tensor(
    alone: Any, tmp_path: Path, predicting: int | None
) -> None:
    """Trained they are the same layers; not trained they are copied as the file has them."""
    folder = tmp_path / "model"
    make_tiny_model(
        "Qwen3_5MoeForConditionalGeneration", folder, num_hidden_layers=4, mtp_num_hidden_layers=1
    )

    def layers() -> dict[str, Tensor]:
        chunks, hf, gpt = convert_worker.build(str(folder), alone, predicting=predicting)
        settings: dict[str, Any] = {"hf": hf, "gpt": gpt, "layout": alone}
        convert_worker.load_hf_weights(chunks, str(folder), **settings)
        exported = dict(convert_worker.HfExport(chunks, **settings).stream())
        return exported | dict(untrained_weights(hf, str(folder), predicting))

    each = layers()
    tensors = load_file(folder / "model.safetensors")
    block = "mtp.layers.0.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{block}.{e}.{part}.weight") for e in range(4)])
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    packed = {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    save_file(tensors | packed, folder / "model.safetensors")
    fused = layers()
    if predicting is None:
        for name in [name for name in each if name.startswith(block)]:
            del each[name]
        each |= packed
    assert fused.keys() == each.keys() and all(torch.equal(fused[n], each[n]) for n in each)


def test_glm_flash_as_transformers_saves_it(alone: Any, tmp_path: Path) -> None:
    """Its class derives head_dim, and does not save it; 2048 channels are no multiple of 20 heads."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 3, "num_key_value_heads": 3}
    make_tiny_model("Glm4MoeLiteForCausalLM", tmp_path / "saved", **sizes)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "head_dim" not in saved, "what this test is about"
    check_against_transformers("Glm4MoeLiteForCausalLM", sizes, alone, tmp_path)


def test_gpt_oss_in_mxfp4(alone: Any, tmp_path: Path) -> None:
    """As the published files have the experts: what transformers dequantises, bit by bit."""
    folder, generator = tmp_path / "model", torch.Generator().manual_seed(5)
    make_tiny_model("gpt-oss-20b", folder, intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(110, 125, shape, generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = Ours(folder, alone, torch.float32).exported()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "family", ["Qwen3_5Moe", pytest.param("Qwen3_5", marks=pytest.mark.extended)]
)
def test_a_language_model_saved_with_the_names_of_the_whole(
    family: str, alone: Any, tmp_path: Path
) -> None:
    """As transformers saves what it took out of a model with a vision tower."""
    full, text = tmp_path / "whole", tmp_path / "text"
    make_tiny_model(f"{family}ForConditionalGeneration", full)
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(full)
    model.save_pretrained(text)
    names = load_file(text / "model.safetensors").keys()
    assert any(name.startswith("model.language_model.") for name in names)
    found, expected = (Ours(f, alone, torch.float32).exported() for f in (text, full))
    renamed = {n.replace("model.language_model.", "model.", 1): t for n, t in expected.items()}
    assert found.keys() == renamed.keys()
    assert all(torch.equal(found[n], renamed[n]) for n in found)


def test_the_pages_have_every_family() -> None:
    for page in ("docs/en/models.md", "docs/zh/models.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in model_families.names() if f"`{name}`" not in text] == []


def test_published_names_are_found() -> None:
    """By the longest beginning that fits."""
    for name, architecture in {
        "zai-org/GLM-4.7": "Glm4MoeForCausalLM",
        "GLM-4.7-Flash": "Glm4MoeLiteForCausalLM",
        "Qwen/Qwen3-4B-Instruct-2507": "Qwen3ForCausalLM",
        "Qwen3-30B-A3B": "Qwen3MoeForCausalLM",
        "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "Qwen3ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
    }.items():
        assert family_of(name).architecture == architecture
    with pytest.raises(ValueError, match=r"gpt2.*LlamaForCausalLM"):
        family_of("gpt2")


def test_a_buffer_without_a_mapping_is_found(alone: Any, tmp_path: Path) -> None:
    """It would be in no export; one that is not saved is none of the model's weights."""
    make_tiny_model("Qwen3ForCausalLM", tmp_path / "model")
    ours = Ours(tmp_path / "model", alone, torch.float32)
    mlp = ours.chunks[0].decoder.layers[0].mlp
    mlp.register_buffer("counts", torch.zeros(3), persistent=False)
    assert ours.exported()
    mlp.register_buffer("bias", torch.zeros(3))
    with pytest.raises(
        AssertionError, match=r"layers\.0\.mlp\.bias: this persistent buffer has no"
    ):
        ours.exported()
