"""Rules about MoE: parallel sizes of experts, routers, load balancing and routing replay."""

from __future__ import annotations

from arguments.rules.base import LayoutSettings, Rule, Settings, Warn, problem
from arguments.rules.pipeline import virtual_stages_of
from slime_like.config import Problem


def experts_of(s: LayoutSettings) -> int:
    """Experts per MoE layer; 0 for a dense network."""
    return int(s.core.get("num_moe_experts") or 0)


def balancing_of(s: Settings) -> tuple[list[str], list[float]]:
    """Types and coefficients of the auxiliary losses, of which each flag takes one or several."""
    kinds = s.core.get("moe_router_load_balancing_type", "aux_loss")
    coefficients = s.core.get("moe_aux_loss_coeff", 0.0)
    return (
        kinds if isinstance(kinds, list) else [kinds],
        coefficients if isinstance(coefficients, list) else [coefficients],
    )


def check_dense_network(s: Settings) -> list[Problem]:
    if experts_of(s):
        return []
    message = "has no effect: the network has no experts; remove it"
    problems = []
    for name in sorted(n for n in s.given if n.startswith(("moe_", "expert_"))):
        value = getattr(s.parallel, name) if name.startswith("expert_") else s.core.get(name)
        if value != 1 or not name.startswith("expert_"):
            problems += problem(name, value, message)
    for module in {"moe", "shared_experts"} & set(s.core.get("recompute_modules") or []):
        problems += problem("recompute_modules", module, message)
    return problems


def check_expert_parallel_sizes(s: LayoutSettings) -> list[Problem]:
    experts = experts_of(s)
    parallel = s.parallel
    if not experts:
        return []
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    problems = []
    if experts % ep:
        message = f"must be a divisor of {experts}, the number of experts"
        problems += problem("expert_model_parallel_size", ep, message)
    ffn = s.core.get("moe_ffn_hidden_size") or s.core.get("ffn_hidden_size")
    if ffn and ffn % etp:
        message = f"must divide --moe-ffn-hidden-size {ffn}"
        problems += problem("expert_tensor_parallel_size", etp, message)
    if etp > 1 and s.core.get("add_bias_linear"):
        message = (
            "must be 1 for experts with biases, which megatron-core does not shard; "
            "use --expert-model-parallel-size"
        )
        problems += problem("expert_tensor_parallel_size", etp, message)
    shared = s.core.get("moe_shared_expert_intermediate_size")
    if shared and shared % tp:
        message = f"must divide --moe-shared-expert-intermediate-size {shared}"
        problems += problem("tensor_model_parallel_size", tp, message)
    if s.world_size % (ep * etp * pp):
        message = (
            f"x --expert-tensor-parallel-size {etp} x --pipeline-model-parallel-size {pp} = "
            f"{ep * etp * pp} does not divide the {s.world_size} processes"
        )
        problems += problem("expert_model_parallel_size", ep, message)
    return problems


def check_expert_sequence_parallel(s: Settings) -> list[Problem]:
    """MoE with tensor parallelism needs sequence parallelism; megatron-core raises only in the
    first training step. Without it every tensor-parallel rank would dispatch all tokens."""
    if not experts_of(s) or not s.trains:
        return []
    if s.parallel.tensor_model_parallel_size == 1 or s.parallel.sequence_parallel:
        return []
    message = "required for experts with --tensor-model-parallel-size above 1"
    return problem("sequence_parallel", None, message)


def check_expert_tensor_parallel(s: Settings) -> list[Problem]:
    """Expert tensor parallelism that differs from tensor parallelism needs expert parallelism:
    otherwise megatron-core reduces expert gradients over the groups of the other weights, which are
    right only if both are sharded equally."""
    etp = s.parallel.expert_tensor_parallel_size
    tp = s.parallel.tensor_model_parallel_size
    if not experts_of(s) or not s.trains:
        return []
    if etp in (None, tp) or s.parallel.expert_model_parallel_size > 1:
        return []
    message = (
        f"other than --tensor-model-parallel-size {tp} requires --expert-model-parallel-size "
        "above 1: megatron-core would reduce gradients over the wrong groups"
    )
    return problem("expert_tensor_parallel_size", etp, message)


def check_token_dispatcher(s: Settings) -> list[Problem]:
    """The allgather dispatcher is incompatible with pipeline stages that exchange shapes, as packed
    sequences require; megatron-core's condition."""
    pipelined = s.parallel.pipeline_model_parallel_size > 1
    plain_pipeline = pipelined and not virtual_stages_of(s.parallel, s.core)
    if not experts_of(s) or not plain_pipeline:
        return []
    if s.core.get("moe_token_dispatcher_type") != "allgather":
        return []
    message = (
        "cannot be combined with --pipeline-model-parallel-size without virtual stages; "
        "use alltoall"
    )
    return problem("moe_token_dispatcher_type", "allgather", message)


def check_load_balancing(s: Settings) -> list[Problem]:
    if not experts_of(s):
        return []
    kinds, coefficients = balancing_of(s)
    if len(kinds) != len(coefficients):
        value = s.core.get("moe_aux_loss_coeff", 0.0)
        message = f"must be {len(kinds)} numbers, one per --moe-router-load-balancing-type"
        return problem("moe_aux_loss_coeff", value, message)
    problems = []
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if kind == "none" and coefficient:
            message = "has no effect with --moe-router-load-balancing-type none"
            problems += problem("moe_aux_loss_coeff", coefficient, message)
        if kind == "none" and len(kinds) > 1:
            message = "cannot be combined with other values; remove it"
            problems += problem("moe_router_load_balancing_type", kind, message)
    return problems


def check_router(s: Settings) -> list[Problem]:
    experts = experts_of(s)
    topk = s.core.get("moe_router_topk", 2)
    if not experts:
        return []
    if not 1 <= topk <= experts:
        return problem(
            "moe_router_topk", topk, f"must be from 1 to {experts}, the number of experts"
        )
    score_function = s.core.get("moe_router_score_function", "softmax")
    if s.core.get("moe_router_enable_expert_bias") and score_function != "sigmoid":
        message = "requires --moe-router-score-function sigmoid"
        return problem("moe_router_enable_expert_bias", None, message)
    freq = s.core.get("moe_layer_freq", 1)
    layers = s.core.get("num_layers")
    if isinstance(freq, list) and layers and len(freq) != layers:
        return problem("moe_layer_freq", freq, f"has {len(freq)} entries for {layers} layers")
    return []


def check_capacity(s: Settings) -> list[Problem]:
    """DeepSeek-V4's routing, which is not megatron-core's, drops no tokens."""
    if not s.core.get("router_scores"):
        return []
    names = (
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
    )
    message = "is not supported with DeepSeek-V4, whose experts drop no tokens; remove it"
    return [
        p for name in names if name in s.given for p in problem(name, s.core.get(name), message)
    ]


def check_routing_replay(s: Settings) -> list[Problem]:
    if not s.algorithm.use_routing_replay or s.rollout.use_rollout_routing_replay:
        return []
    if not (s.algorithm.use_rollout_logprobs or s.supervised):
        return []
    other = "--loss-type sft_loss" if s.supervised else "--use-rollout-logprobs"
    message = f"requires the forward pass of the old log-probs, which {other} omits"
    return problem("use_routing_replay", None, message)


MOE_RULES: tuple[Rule, ...] = (
    check_dense_network,
    check_expert_parallel_sizes,
    check_expert_sequence_parallel,
    check_expert_tensor_parallel,
    check_token_dispatcher,
    check_load_balancing,
    check_router,
    check_capacity,
    check_routing_replay,
)


def warn_dropped_tokens(s: Settings) -> str | None:
    if not experts_of(s) or s.core.get("moe_expert_capacity_factor") is None:
        return None
    return (
        "--moe-expert-capacity-factor drops tokens by the load of a micro-batch: old log-probs, "
        "update and rollout engine see different networks, and results depend on the layout"
    )


def warn_micro_batch_balancing(s: Settings) -> str | None:
    kinds, coefficients = balancing_of(s)
    active = any(c and kind == "aux_loss" for kind, c in zip(kinds, coefficients, strict=False))
    if not experts_of(s) or not s.trains or not active:
        return None
    return (
        "--moe-aux-loss-coeff with aux_loss balances within each micro-batch: results depend on "
        "how an optimizer step is split"
    )


MOE_WARNINGS: tuple[Warn, ...] = (warn_dropped_tokens, warn_micro_batch_balancing)
