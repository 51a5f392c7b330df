"""Rules about the network: what describes it, its layers and experts, what is recomputed; and the
rules about sizes by themselves, for programs that cut a network and do not train it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arguments.megatron import required_without_checkpoint
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import LayoutSettings, Rule, Settings, problem
from arguments.rules.declared import has_critic
from arguments.rules.layout import (
    delta_nets_share_their_groups,
    tensor_parallel_divides_the_network,
    world_is_divisible,
)
from arguments.rules.pipeline import pipeline_divides_the_layers, virtual_stages_of
from arguments.rules.prediction import prediction_layers_are_there
from arguments.schema import ParallelConfig
from slime_like.config import Problem, check_fields, flag_name
from slime_like.import_utils import load_function

# --- network -------------------------------------------------------------------------------------


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


def model_provider(s: Settings) -> list[Problem]:
    """It can be imported, and builds all networks of the run."""
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


# --- moe -----------------------------------------------------------------------------------------


NEEDS_TRANSFORMER_ENGINE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def experts_of(s: LayoutSettings) -> int:
    """Experts of each expert layer; 0 for a dense network."""
    return int(s.core.get("num_moe_experts") or 0)


def balancing_of(s: Settings) -> list[tuple[str, float]]:
    """(kind, coefficient) of every auxiliary loss that is asked for; --moe-aux-loss-coeff is one
    number, or one for each kind."""
    kinds, coefficients = (
        s.core.get("moe_router_load_balancing_type", "aux_loss"),
        s.core.get("moe_aux_loss_coeff", 0.0),
    )
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    return list(zip(kinds, coefficients, strict=False))


def experts_are_there(s: Settings) -> list[Problem]:
    if experts_of(s):
        return []
    dense = "has no effect: the network has no experts; leave it out"
    found = []
    for name in sorted(n for n in s.given if n.startswith(("moe_", "expert_"))):
        value = getattr(s.parallel, name) if name.startswith("expert_") else s.core.get(name)
        if value != 1 or not name.startswith("expert_"):
            found += problem(name, value, dense)
    for module in {"moe", "shared_experts"} & set(s.core.get("recompute_modules") or []):
        found += problem("recompute_modules", module, dense)
    return found


def expert_parallel_sizes(s: LayoutSettings) -> list[Problem]:
    experts, parallel = experts_of(s), s.parallel
    if not experts:
        return []
    ep, pp = parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    found = []
    if experts % ep:
        found += problem(
            "expert_model_parallel_size",
            ep,
            f"does not divide the {experts} experts; choose a divisor of {experts}",
        )
    ffn = s.core.get("moe_ffn_hidden_size") or s.core.get("ffn_hidden_size")
    if ffn and ffn % etp:
        found += problem(
            "expert_tensor_parallel_size",
            etp,
            f"does not divide the experts' inner size {ffn} (--moe-ffn-hidden-size)",
        )
    if etp > 1 and s.core.get("add_bias_linear"):
        words = "cuts experts that have biases, which megatron-core refuses; give 1, with --expert-model-parallel-size above 1"
        found += problem("expert_tensor_parallel_size", etp, words)
    shared, tp = (
        s.core.get("moe_shared_expert_intermediate_size"),
        parallel.tensor_model_parallel_size,
    )
    if shared and shared % tp:
        found += problem(
            "tensor_model_parallel_size",
            tp,
            f"does not divide the shared expert's inner size {shared}",
        )
    if s.world_size % (ep * etp * pp):
        sizes = f"x --expert-tensor-parallel-size {etp} x --pipeline-model-parallel-size {pp} = {ep * etp * pp}"
        found += problem(
            "expert_model_parallel_size",
            ep,
            f"{sizes} does not divide the {s.world_size} processes",
        )
    return found


def experts_need_sequence_parallel(s: Settings) -> list[Problem]:
    """megatron-core raises in the first training step: each tensor-parallel rank would dispatch all
    tokens again."""
    if (
        experts_of(s)
        and s.trains
        and s.parallel.tensor_model_parallel_size > 1
        and not s.parallel.sequence_parallel
    ):
        return problem(
            "sequence_parallel",
            None,
            "is missing; experts with --tensor-model-parallel-size above 1 need it",
        )
    return []


def experts_cut_otherwise_are_spread(s: Settings) -> list[Problem]:
    """Without expert parallelism megatron-core reduces the gradients of experts over the groups of
    the other weights, which are those of experts only where both are cut alike."""
    etp, tp = s.parallel.expert_tensor_parallel_size, s.parallel.tensor_model_parallel_size
    if (
        experts_of(s)
        and s.trains
        and etp not in (None, tp)
        and s.parallel.expert_model_parallel_size == 1
    ):
        message = f"is not --tensor-model-parallel-size {tp}, which needs --expert-model-parallel-size above 1: gradients would be wrong without"
        return problem("expert_tensor_parallel_size", etp, message)
    return []


def dispatcher_fits_the_pipeline(s: Settings) -> list[Problem]:
    """megatron-core's condition on pipelines whose stages exchange shapes, which packed rows need."""
    plain_pipeline = s.parallel.pipeline_model_parallel_size > 1 and not virtual_stages_of(
        s.parallel, s.core
    )
    if experts_of(s) and s.core.get("moe_token_dispatcher_type") == "allgather" and plain_pipeline:
        return problem(
            "moe_token_dispatcher_type",
            "allgather",
            "does not go with the plain schedule of --pipeline-model-parallel-size; use alltoall",
        )
    return []


def expert_kernels_are_there(s: Settings) -> list[Problem]:
    if resolve_transformer_impl(s.model, s.machine) == "transformer_engine":
        return []
    return [
        found
        for name in NEEDS_TRANSFORMER_ENGINE
        if s.core.get(name)
        for found in problem(
            name, None, "needs Transformer Engine layers, which are not used here; leave it out"
        )
    ]


def balancing_is_complete(s: Settings) -> list[Problem]:
    kinds, coefficients = (
        s.core.get("moe_router_load_balancing_type", "aux_loss"),
        s.core.get("moe_aux_loss_coeff", 0.0),
    )
    if not experts_of(s):
        return []
    several = len(kinds) if isinstance(kinds, list) else 1
    if several != (len(coefficients) if isinstance(coefficients, list) else 1):
        return problem(
            "moe_aux_loss_coeff",
            coefficients,
            f"must be as many numbers as --moe-router-load-balancing-type has words: {several}",
        )
    found = []
    for kind, coefficient in balancing_of(s):
        if coefficient < 0:
            found += problem("moe_aux_loss_coeff", coefficient, "must be >= 0")
        if kind == "none" and coefficient:
            found += problem(
                "moe_aux_loss_coeff",
                coefficient,
                "has no effect with --moe-router-load-balancing-type none",
            )
        if several > 1 and kind == "none":
            found += problem(
                "moe_router_load_balancing_type",
                kind,
                "stands alone; leave it out beside other words",
            )
    if (s.core.get("moe_z_loss_coeff") or 0.0) < 0:
        found += problem("moe_z_loss_coeff", s.core["moe_z_loss_coeff"], "must be >= 0")
    return found


def routing_is_possible(s: Settings) -> list[Problem]:
    experts, topk = experts_of(s), s.core.get("moe_router_topk", 2)
    if not experts:
        return []
    if not 1 <= topk <= experts:
        return problem(
            "moe_router_topk", topk, f"must be between 1 and the number of experts, {experts}"
        )
    if (
        s.core.get("moe_router_enable_expert_bias")
        and s.core.get("moe_router_score_function", "softmax") != "sigmoid"
    ):
        return problem(
            "moe_router_enable_expert_bias",
            None,
            "needs --moe-router-score-function sigmoid, which the network does not have",
        )
    freq, layers = s.core.get("moe_layer_freq", 1), s.core.get("num_layers")
    if isinstance(freq, list) and layers and len(freq) != layers:
        return problem("moe_layer_freq", freq, f"has {len(freq)} entries for {layers} layers")
    return []


def replay_has_something_to_replay(s: Settings) -> list[Problem]:
    if not s.algorithm.use_routing_replay:
        return []
    if s.rollout.use_rollout_routing_replay:
        return []
    if s.algorithm.use_rollout_logprobs or s.algorithm.loss_type == "sft_loss":
        why = (
            "--loss-type sft_loss"
            if s.algorithm.loss_type == "sft_loss"
            else "--use-rollout-logprobs"
        )
        return problem(
            "use_routing_replay",
            None,
            f"needs the pass of the old log-probs, which {why} leaves out",
        )
    return []


MOE_RULES: tuple[Rule, ...] = (
    experts_are_there, expert_parallel_sizes, experts_need_sequence_parallel, experts_cut_otherwise_are_spread, dispatcher_fits_the_pipeline,
    expert_kernels_are_there, balancing_is_complete, routing_is_possible, replay_has_something_to_replay, )  # fmt: skip


def dropped_tokens(s: Settings) -> str | None:
    if experts_of(s) and s.core.get("moe_expert_capacity_factor") is not None:
        return (
            f"{flag_name('moe_expert_capacity_factor')} drops tokens by the load of a micro-batch: old log-probs, the update and the sampler "
            "see other networks, and results depend on the layout"
        )
    return None


def balancing_by_micro_batch(s: Settings) -> str | None:
    kinds = [kind for kind, coefficient in balancing_of(s) if coefficient and kind == "aux_loss"]
    if experts_of(s) and s.trains and kinds:
        return "--moe-aux-loss-coeff with aux_loss balances within each micro-batch: results depend on how an optimizer step is cut"
    return None


MOE_WARNINGS: tuple[Callable[[Settings], str | None], ...] = (
    dropped_tokens,
    balancing_by_micro_batch,
)


# --- cut -----------------------------------------------------------------------------------------


RULES = (
    world_is_divisible,
    tensor_parallel_divides_the_network,
    delta_nets_share_their_groups,
    pipeline_divides_the_layers,
    expert_parallel_sizes,
)


@dataclass(frozen=True, slots=True)
class CutNetwork:
    """core: megatron-core's fields of the network."""

    parallel: ParallelConfig
    core: Mapping[str, Any]
    world_size: int


def layout_problems(cut: CutNetwork) -> list[Problem]:
    """What is wrong with the sizes on their own; else with the network, and with the number of
    processes."""
    return check_fields(cut.parallel) or [found for rule in RULES for found in rule(cut)]
