"""Rules about the network: its description, layers and recomputation. Also the rules about parallel
sizes alone, for programs that shard a network without training it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.megatron import required_without_checkpoint
from arguments.megatron_configs import resolve_transformer_impl
from arguments.model_base import known_model_bases, resolve_model_base
from arguments.rules.base import Rule, Settings, import_problem, problem
from arguments.rules.declared import has_critic
from arguments.rules.layout import (
    check_delta_net_parallel,
    check_indexer_stages,
    check_memory_parallel,
    check_output_groups,
    check_stages_of_shared_keys,
    check_tensor_parallel,
    check_world_size,
)
from arguments.rules.moe import check_expert_parallel_sizes
from arguments.rules.pipeline import check_pipeline_split
from arguments.rules.prediction import check_mtp_layers
from arguments.schema import ParallelConfig
from megatron_patches.patch import megatron_version
from slime_like.config import Problem, flag_name

NEEDS_TRANSFORMER_ENGINE = "requires Transformer Engine layers"
# settings of megatron-core that its HybridModel ignores, or does not survive
OF_GPT_MODEL = ("cpu_offloading", "overlap_moe_expert_parallel_comm", "mla_down_proj_fusion")


def check_network_flags(s: Settings) -> list[Problem]:
    described = s.gpt.vocab_size is not None or any(
        s.core.get(n) for n in ("num_layers", "hidden_size", "num_attention_heads")
    )
    if s.model.hf_checkpoint is not None or not (described or s.debug.debug_train_only):
        return []
    message = "required to describe the network without --hf-checkpoint"
    return [Problem(name, None, message) for name in required_without_checkpoint(s.core, s.gpt)]


def check_hf_checkpoint(s: Settings) -> list[Problem]:
    if s.model.hf_checkpoint is not None or not s.needs_hf_checkpoint:
        return []
    message = "required: a folder with a Hugging Face model and its tokenizer"
    return problem("hf_checkpoint", None, message)


def check_transformer_engine(s: Settings) -> list[Problem]:
    if s.machine.engine_without_extension:
        message = (
            "Transformer Engine is installed without its extension for torch, so megatron-core "
            "cannot be imported: pip install 'transformer-engine[pytorch]', or remove "
            "transformer-engine"
        )
        return problem("transformer_impl", s.model.transformer_impl, message)
    if s.model.transformer_impl != "transformer_engine":
        return []
    if s.machine.transformer_engine and s.machine.cuda:
        return []
    missing = "CUDA" if s.machine.transformer_engine else "the package transformer_engine"
    message = f"requires {missing}; use local or auto"
    return problem("transformer_impl", "transformer_engine", message)


def check_local_layers(s: Settings) -> list[Problem]:
    if resolve_transformer_impl(s.model, s.machine) == "transformer_engine":
        return []
    problems = []
    backend = s.core.get("attention_backend", "auto")
    if backend not in ("auto", "local"):
        message = f"{NEEDS_TRANSFORMER_ENGINE}; use auto or local"
        problems += problem("attention_backend", backend, message)
    with_own_norms = ("linear_attention_freq", "post_mlp_layernorm", "head_gates")
    own_norms = any(s.core.get(name) for name in with_own_norms)
    if s.core.get("layernorm_zero_centered_gamma") and not own_norms:
        message = f"{NEEDS_TRANSFORMER_ENGINE}; remove it"
        problems.append(Problem("--apply-layernorm-1p", None, message))
    return problems


def check_attention_backend(s: Settings) -> list[Problem]:
    """With Transformer Engine layers the backend is one of its kernels. megatron-core selects it by
    environment variables, and asserts if they are set differently."""
    if resolve_transformer_impl(s.model, s.machine) != "transformer_engine":
        return []
    backend = s.core.get("attention_backend", "auto")
    if backend == "local":
        message = "requires --transformer-impl local; or use auto, flash, fused or unfused"
        return problem("attention_backend", backend, message)
    conflicts = []
    for kernel in ("flash", "fused", "unfused"):
        name = f"NVTE_{kernel.upper()}_ATTN"
        value = str(int(backend in (kernel, "auto")))
        if os.environ.get(name, value) != value:
            conflicts.append(f"{name}={os.environ[name]}")
    if not conflicts:
        return []
    message = f"conflicts with the environment variables {', '.join(conflicts)}; unset them"
    return problem("attention_backend", backend, message)


def check_fused_activation(s: Settings) -> list[Problem]:
    """megatron-core's fused SwiGLU ignores the clamp of GLM-5.3's activations."""
    if not s.core.get("bias_activation_fusion") or s.core.get("activation_func") == "quick_gelu":
        return []
    limit = s.core.get("activation_func_clamp_value")
    if limit is None:
        return []
    message = f"would not clamp this model's activations (swiglu_limit {limit:g}); remove it"
    return problem("bias_activation_fusion", True, message)


def check_model_base(s: Settings) -> list[Problem]:
    """The installed megatron-core has the class, and the class takes the settings."""
    base = s.gpt.model_base
    if base not in ("auto", *known_model_bases()):
        message = f"megatron-core {megatron_version()} has no HybridModel: use auto or gpt"
        return problem("model_base", base, message)
    if resolve_model_base(base) == "gpt":
        return []
    given = [name for name in OF_GPT_MODEL if s.core.get(name)]
    message = "has no effect in megatron-core's HybridModel; use --model-base gpt"
    return [Problem("--allow-untested", name, message) for name in given]


def check_network_sizes(s: Settings) -> list[Problem]:
    problems = []
    heads = s.core.get("num_attention_heads")
    groups = s.core.get("num_query_groups")
    hidden = s.core.get("hidden_size")
    if heads and groups and heads % groups:
        problems += problem(
            "num_query_groups", groups, f"must divide --num-attention-heads {heads}"
        )
    if heads and hidden and not problems and s.core.get("kv_channels") is None and hidden % heads:
        message = f"must divide --hidden-size {hidden}, unless --kv-channels is set"
        problems += problem("num_attention_heads", heads, message)
    return problems


def check_model_provider(s: Settings) -> list[Problem]:
    """The model provider can be imported, and the run has no critic, which it would not build."""
    path = s.gpt.custom_model_provider_path
    name = "custom_model_provider_path"
    if path is None:
        return []
    problems = import_problem(name, path)
    if not problems and has_critic(s):
        message = f"cannot be combined with {flag_name(name)}, which does not build a critic"
        return problem("advantage_estimator", s.algorithm.advantage_estimator, message)
    return problems


NETWORK_RULES: tuple[Rule, ...] = (
    check_model_provider,
    check_network_flags,
    check_hf_checkpoint,
    check_mtp_layers,
    check_transformer_engine,
    check_fused_activation,
    check_local_layers,
    check_attention_backend,
    check_model_base,
    check_network_sizes,
)


RULES = (
    check_world_size,
    check_tensor_parallel,
    check_delta_net_parallel,
    check_memory_parallel,
    check_output_groups,
    check_pipeline_split,
    check_indexer_stages,
    check_stages_of_shared_keys,
    check_expert_parallel_sizes,
)


@dataclass(frozen=True, slots=True)
class ShardedNetwork:
    """Input of the rules about parallel sizes."""

    parallel: ParallelConfig
    core: Mapping[str, Any]  # megatron-core's fields of the network
    world_size: int


def layout_problems(network: ShardedNetwork) -> list[Problem]:
    """Problems with the parallel sizes for this network and number of processes."""
    return [problem for rule in RULES for problem in rule(network)]
