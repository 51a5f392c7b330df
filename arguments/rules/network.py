"""Rules about the network: its description, layers and recomputation. Also the rules about parallel
sizes alone, for programs that shard a network without training it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.megatron import required_without_checkpoint
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.declared import has_critic
from arguments.rules.layout import (
    delta_nets_share_their_groups,
    stages_begin_with_an_indexer,
    tensor_parallel_divides_the_network,
    world_is_divisible,
)
from arguments.rules.moe import expert_parallel_sizes
from arguments.rules.pipeline import pipeline_divides_the_layers
from arguments.rules.prediction import prediction_layers_are_there
from arguments.schema import ParallelConfig
from slime_like.config import Problem, flag_name
from slime_like.import_utils import load_function


def network_is_complete(s: Settings) -> list[Problem]:
    described = s.gpt.vocab_size is not None or any(
        s.core.get(n) for n in ("num_layers", "hidden_size", "num_attention_heads")
    )
    if s.model.hf_checkpoint is not None or not (described or s.debug.debug_train_only):
        return []
    remedy = "is missing; without --hf-checkpoint the network is described by flags"
    return [Problem(name, None, remedy) for name in required_without_checkpoint(s.core, s.gpt)]


def checkpoint_is_needed(s: Settings) -> list[Problem]:
    if s.model.hf_checkpoint is None and not s.debug.debug_train_only:
        return problem(
            "hf_checkpoint",
            None,
            "is missing: a folder with a Hugging Face model, for its weights and its tokenizer",
        )
    return []


def transformer_engine_is_there(s: Settings) -> list[Problem]:
    if s.model.transformer_impl != "transformer_engine" or (
        s.machine.transformer_engine and s.machine.cuda
    ):
        return []
    missing = (
        "Transformer Engine, which is not installed"
        if not s.machine.transformer_engine
        else "CUDA, which is not available here"
    )
    return problem("transformer_impl", "transformer_engine", f"needs {missing}; use local or auto")


def local_layers_have_limits(s: Settings) -> list[Problem]:
    if resolve_transformer_impl(s.model, s.machine) == "transformer_engine":
        return []
    found = []
    backend = s.core.get("attention_backend", "auto")
    if backend not in ("auto", "local"):
        found += problem(
            "attention_backend",
            backend,
            "needs Transformer Engine layers, which are not used here; use auto or local",
        )
    own_norms = s.core.get("linear_attention_freq") or s.core.get("post_mlp_layernorm")
    if s.core.get("layernorm_zero_centered_gamma") and not own_norms:
        found.append(
            Problem(
                "--apply-layernorm-1p",
                None,
                "needs Transformer Engine layers, which are not used here; leave it out",
            )
        )
    return found


def attention_backend_is_there(s: Settings) -> list[Problem]:
    """With Transformer Engine layers the backend is one of its kernels. megatron-core selects it by
    environment variables, and asserts if they are set differently."""
    if resolve_transformer_impl(s.model, s.machine) != "transformer_engine":
        return []
    backend = s.core.get("attention_backend", "auto")
    if backend == "local":
        words = "is the attention of layers without Transformer Engine; use auto, flash, fused or unfused, or --transformer-impl local"
        return problem("attention_backend", backend, words)
    wanted = {
        f"NVTE_{kernel.upper()}_ATTN": str(int(backend in (kernel, "auto")))
        for kernel in ("flash", "fused", "unfused")
    }
    set_otherwise = [
        f"{name}={os.environ[name]}"
        for name, value in wanted.items()
        if os.environ.get(name, value) != value
    ]
    if set_otherwise:
        words = f"contradicts the environment's {', '.join(set_otherwise)}; unset what NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN say"
        return problem("attention_backend", backend, words)
    return []


def recompute_is_complete(s: Settings) -> list[Problem]:
    granularity = s.core.get("recompute_granularity")
    found = distributed_activations(s)
    if granularity is None:
        extra = [
            n
            for n in ("recompute_method", "recompute_num_layers", "recompute_modules")
            if s.core.get(n) is not None
        ]
        return found + [
            Problem(flag_name(n), s.core[n], "needs --recompute-granularity") for n in extra
        ]
    if granularity == "full" and s.core.get("recompute_modules") is not None:
        found += problem(
            "recompute_modules",
            s.core["recompute_modules"],
            "goes with --recompute-granularity selective only; leave it out",
        )
    for name in ("recompute_method", "recompute_num_layers"):
        value = s.core.get(name)
        if granularity == "full" and value is None:
            found += problem(name, None, "is missing; --recompute-granularity full needs it")
        if granularity == "selective" and value is not None:
            found += problem(
                name, value, "goes with --recompute-granularity full only; leave it out"
            )
    return found


def distributed_activations(s: Settings) -> list[Problem]:
    """Conditions of --distribute-saved-activations: megatron-core's, and a tensor-parallel size
    above 1."""
    if not s.core.get("distribute_saved_activations"):
        return []
    if s.core.get("recompute_granularity") != "full":
        return problem("distribute_saved_activations", None, "needs --recompute-granularity full")
    if s.parallel.tensor_model_parallel_size == 1:
        return problem(
            "distribute_saved_activations",
            None,
            "needs --tensor-model-parallel-size above 1, whose ranks share what is saved",
        )
    if s.parallel.sequence_parallel:
        return problem(
            "distribute_saved_activations",
            None,
            "does not go with --sequence-parallel, which shares what is saved anyway; leave it out",
        )
    return []


def network_numbers(s: Settings) -> list[Problem]:
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "kv_channels",
    )
    found = [
        p
        for n in names
        if s.core.get(n) is not None and s.core[n] < 1
        for p in problem(n, s.core[n], "must be >= 1")
    ]
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= s.core.get(name, 0.0) < 1:
            found += problem(name, s.core[name], "must be 0 <= x < 1")
    heads, query_groups, hidden = (
        s.core.get("num_attention_heads"),
        s.core.get("num_query_groups"),
        s.core.get("hidden_size"),
    )
    if heads and query_groups and not found and heads % query_groups:
        found += problem(
            "num_query_groups", query_groups, f"does not divide --num-attention-heads {heads}"
        )
    if heads and hidden and not found and s.core.get("kv_channels") is None and hidden % heads:
        found += problem(
            "num_attention_heads",
            heads,
            f"does not divide --hidden-size {hidden}, and there is no --kv-channels",
        )
    return found


def model_provider(s: Settings) -> list[Problem]:
    """The model provider can be imported, and the run has no critic, which it would not build."""
    path, name = s.gpt.custom_model_provider_path, "custom_model_provider_path"
    if path is None:
        return []
    flag = flag_name(name)
    try:
        load_function(path, flag)
    except ValueError as error:
        return problem(name, None, str(error).removeprefix(flag + " "))
    if has_critic(s):
        estimator = s.algorithm.advantage_estimator
        words = f"does not go with {flag}: a critic is built as without it; leave one out"
        return problem("advantage_estimator", estimator, words)
    return []


NETWORK_RULES: tuple[Rule, ...] = (
    model_provider, network_is_complete, checkpoint_is_needed, prediction_layers_are_there, transformer_engine_is_there, local_layers_have_limits, attention_backend_is_there,
    recompute_is_complete, network_numbers,
)  # fmt: skip


RULES = (
    world_is_divisible,
    tensor_parallel_divides_the_network,
    delta_nets_share_their_groups,
    pipeline_divides_the_layers,
    stages_begin_with_an_indexer,
    expert_parallel_sizes,
)


@dataclass(frozen=True, slots=True)
class CutNetwork:
    """Input of the rules about parallel sizes. core: megatron-core's fields of the network."""

    parallel: ParallelConfig
    core: Mapping[str, Any]
    world_size: int


def layout_problems(cut: CutNetwork) -> list[Problem]:
    """Problems with the parallel sizes for this network and number of processes."""
    return [found for rule in RULES for found in rule(cut)]
