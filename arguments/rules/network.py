"""Rules about the network: what describes it, which layers make it, what is recomputed."""

from __future__ import annotations

import os

from arguments.megatron import required_without_checkpoint
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem, flag_name


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
    if s.core.get("layernorm_zero_centered_gamma"):
        found.append(
            Problem(
                "--apply-layernorm-1p",
                None,
                "needs Transformer Engine layers, which are not used here; leave it out",
            )
        )
    return found


def attention_backend_is_there(s: Settings) -> list[Problem]:
    """With Transformer Engine layers: one of its kernels. megatron-core chooses by environment
    variables, and asserts on those it finds."""
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
    """megatron-core's condition, and where they would be distributed over nobody."""
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


NETWORK_RULES: tuple[Rule, ...] = (
    network_is_complete, checkpoint_is_needed, transformer_engine_is_there, local_layers_have_limits, attention_backend_is_there,
    recompute_is_complete, network_numbers,
)  # fmt: skip
