"""Rules about the memory of the optimizer: state of other types than float32, and state that is
kept on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from arguments.megatron import OPTIMIZER_DTYPES
from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem, flag_name

PRECISE, OFFLOAD = "use_precision_aware_optimizer", "optimizer_cpu_offload"
IN_PLAIN_TORCH = ("fp32", "bf16")  # of the moments
# Above it a second moment in bf16 cannot shrink: 1 - beta2 of it is less than half of its last bit
# (2^-9 to 2^-8 of its value).
LARGEST_BETA2_OF_BF16 = 1 - 2**-8


def types_of_optimizer_state(s: Settings) -> list[Problem]:
    core, found = s.core, []
    if not core.get(PRECISE):
        for name in OPTIMIZER_DTYPES:
            if core.get(name, "fp32") != "fp32":
                found += problem(name, core[name], f"needs {flag_name(PRECISE)}")
        return found
    if core.get("optimizer", "adam") != "adam":
        found += problem(PRECISE, None, "needs --optimizer adam")
    if not core.get("use_distributed_optimizer"):
        found += problem(PRECISE, None, "needs --use-distributed-optimizer, one process included")
    if s.lora.lora_rank:
        found += problem(
            PRECISE, None, "does not go with --lora-rank, whose optimizer is small; leave it out"
        )
    if s.machine.transformer_engine:
        return found
    if s.machine.apex:
        found += problem(
            PRECISE,
            None,
            "needs Transformer Engine's Adam or torch's; here megatron-core takes Apex's, which cannot do it",
        )
    legal = {
        "main_params_dtype": ("fp32",),
        **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), IN_PLAIN_TORCH),
    }
    for name, words in legal.items():
        if core.get(name, "fp32") not in words:
            found += problem(
                name,
                core[name],
                f"needs Transformer Engine; without it the legal values are: {', '.join(words)}",
            )
    return found


def main_gradients_have_one_type(s: Settings) -> list[Problem]:
    """The optimizer reads the buffers in which gradients are summed."""
    name, given = "main_grads_dtype", s.core.get("main_grads_dtype")
    in_fp32 = s.core.get("grad_reduce_in_fp32")
    if not s.core.get(PRECISE) or given is None:
        return []
    if given == "bf16" and not s.core.get("bf16"):
        return problem(name, given, "needs --bf16")
    if in_fp32 is not None and s.core.get("bf16") and in_fp32 != (given == "fp32"):
        said = "--grad-reduce-in-fp32" if in_fp32 else "--no-grad-reduce-in-fp32"
        return problem(
            name,
            given,
            f"contradicts {said}: it is the type of the buffers in which gradients are summed; leave one of them out",
        )
    return []


def offloading_is_possible(s: Settings) -> list[Problem]:
    """megatron-core's HybridDeviceOptimizer."""
    core, found = s.core, []
    if not core.get(OFFLOAD):
        return []
    if not core.get(PRECISE):  # Megatron-LM's condition too
        found += problem(
            OFFLOAD,
            None,
            f"needs {flag_name(PRECISE)}, whose way of keeping main parameters it takes",
        )
    if not core.get("bf16"):
        found += problem(
            OFFLOAD,
            None,
            "needs --bf16: megatron-core restores fp32 copies of bf16 parameters, and no others",
        )
    if core.get("decoupled_weight_decay") is False:
        found += problem(
            "decoupled_weight_decay",
            None,
            f"must be on with {flag_name(OFFLOAD)}, whose optimizer is AdamW",
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        if core.get(name, "fp32") != "fp32":
            found += problem(
                name,
                core[name],
                f"does not go with {flag_name(OFFLOAD)}, which keeps all of this in fp32; leave it out",
            )
    fraction = core.get("optimizer_offload_fraction", 1.0)
    if not 0 < fraction <= 1:
        found += problem("optimizer_offload_fraction", fraction, "must be above 0 and at most 1")
    elif fraction < 1 and s.machine.cuda and not s.machine.transformer_engine:
        message = "needs Transformer Engine's Adam for the part that stays on the GPU; without it the only legal value is 1.0"
        found += problem("optimizer_offload_fraction", fraction, message)
    return found


OPTIMIZER_RULES: tuple[Rule, ...] = (
    types_of_optimizer_state,
    main_gradients_have_one_type,
    offloading_is_possible,
)


def second_moments_that_cannot_shrink(s: Settings) -> str | None:
    beta2 = s.core.get("adam_beta2", 0.999)
    if s.core.get("exp_avg_sq_dtype") != "bf16" or beta2 <= LARGEST_BETA2_OF_BF16:
        return None
    return (
        f"--exp-avg-sq-dtype bf16 with --adam-beta2 {beta2}: a step takes less than half of bf16's last bit off a second moment, which "
        f"rounding gives back, so that it grows and does not shrink; up to {LARGEST_BETA2_OF_BF16:.3f} it does"
    )


def nothing_to_offload(s: Settings) -> str | None:
    if not s.core.get(OFFLOAD) or s.machine.cuda:
        return None
    return f"{flag_name(OFFLOAD)} saves nothing without a GPU: parameters and their optimizer are in host memory, where they get a second copy"


OPTIMIZER_WARNINGS: tuple[Callable[[Settings], str | None], ...] = (
    second_moments_that_cannot_shrink,
    nothing_to_offload,
)
