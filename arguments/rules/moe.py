"""Rules about MoE: parallel sizes of experts, routers, load balancing and routing replay."""

from __future__ import annotations

from collections.abc import Callable

from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import LayoutSettings, Rule, Settings, problem
from arguments.rules.pipeline import virtual_stages_of
from slime_like.config import Problem, flag_name

NEEDS_TRANSFORMER_ENGINE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def experts_of(s: LayoutSettings) -> int:
    """Experts per MoE layer; 0 for a dense network."""
    return int(s.core.get("num_moe_experts") or 0)


def balancing_of(s: Settings) -> list[tuple[str, float]]:
    """(type, coefficient) of every requested auxiliary loss; --moe-aux-loss-coeff is one number, or
    one per type."""
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
    """MoE with tensor parallelism needs sequence parallelism; megatron-core raises only in the
    first training step. Without it every tensor-parallel rank would dispatch all tokens."""
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
    """Expert tensor parallelism that differs from tensor parallelism needs expert parallelism:
    otherwise megatron-core reduces expert gradients over the groups of the other weights, which are
    right only if both are sharded equally."""
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
    """The allgather dispatcher is incompatible with pipeline stages that exchange shapes, as packed
    sequences require; megatron-core's condition."""
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
                "cannot be combined with other values; leave it out",
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
