"""Rules about the optimizer and its memory, the learning-rate schedule, and LoRA."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from arguments.critic_layout import critic_parallel, layout_flags
from arguments.hf.model import HfModel, read_hf_model
from arguments.hf.peft_adapter import read_adapter_config
from arguments.megatron import OPTIMIZER_DTYPES
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.algorithm import has_critic
from arguments.rules.base import Rule, Settings, problem
from arguments.schema.lora import LATENT_ATTENTION, MIXTRAL_MLP, MLP, TARGETS, UNEMBEDDING
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.weights.families import model_families

# --- optimizer -----------------------------------------------------------------------------------


PRECISE, OFFLOAD = "use_precision_aware_optimizer", "optimizer_cpu_offload"
IN_PLAIN_TORCH = ("fp32", "bf16")  # dtypes of the moments
# With a larger beta2 a second moment in bf16 cannot decrease: the decrement, 1 - beta2 of its
# value, is less than half of its last bit (2^-9 to 2^-8 of its value).
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
    """--main-grads-dtype agrees with the dtype of the gradient buffers, which the optimizer reads
    directly."""
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
    """Conditions of --optimizer-cpu-offload (megatron-core's HybridDeviceOptimizer)."""
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


# --- learning rate -------------------------------------------------------------------------------


def learning_rate(s: Settings) -> list[Problem]:
    lr, min_lr = s.core.get("lr"), s.core.get("min_lr")
    if lr is None:
        return problem("lr", None, "is missing: the learning rate, > 0") if s.trains else []
    if lr <= 0:
        return problem("lr", lr, "must be > 0")
    if min_lr is not None and not 0 <= min_lr <= lr:
        return problem("min_lr", min_lr, f"must be between 0 and --lr {lr}")
    return []


def optimizer_numbers(s: Settings) -> list[Problem]:
    found = []
    for name in ("weight_decay", "clip_grad"):
        if s.core.get(name, 0.0) < 0:
            found += problem(name, s.core[name], "must be >= 0")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if not 0 <= s.core.get(name, 0.0) < 1:
            found += problem(name, s.core[name], "must be 0 <= x < 1")
    if s.core.get("adam_eps", 1.0) <= 0:
        found += problem("adam_eps", s.core["adam_eps"], "must be > 0")
    return found


def warmup(s: Settings) -> list[Problem]:
    iters, decay = s.schedule.lr_warmup_iters, s.schedule.lr_decay_iters
    if decay is not None and iters >= decay:
        return problem("lr_warmup_iters", iters, f"must be below --lr-decay-iters {decay}")
    lr = s.core.get("lr")
    if lr is not None and s.schedule.lr_warmup_init > lr:
        return problem("lr_warmup_init", s.schedule.lr_warmup_init, f"must not be above --lr {lr}")
    return []


def parameter_patterns(s: Settings) -> list[Problem]:
    """Parameter patterns are valid regular expressions."""
    found = []
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(s.model, name):
            try:
                re.compile(pattern)
            except re.error as error:
                found += problem(name, pattern, f"is no regular expression: {error}")
    return found


STEP_RULES: tuple[Rule, ...] = (learning_rate, optimizer_numbers, parameter_patterns)
LEARNING_RATE_RULES: tuple[Rule, ...] = (warmup,)


# --- lora ----------------------------------------------------------------------------------------


def adapters_have_a_base(s: Settings) -> list[Problem]:
    """LoRA needs a Hugging Face model as frozen base."""
    if not s.lora.lora_rank:
        return []
    found = []
    if s.model.hf_checkpoint is None:
        found += problem(
            "lora_rank",
            s.lora.lora_rank,
            "needs --hf-checkpoint, the model that the adapters belong to",
        )
    load = s.checkpoint.load
    if load is not None and (Path(load) / "config.json").is_file():
        found += problem(
            "load",
            load,
            "is a Hugging Face model, and with --lora-rank the model stays as it is; give it as --hf-checkpoint",
        )
    if s.model.ref_offload and reference_is_base(s):
        found += problem(
            "ref_offload",
            None,
            "has no effect with --lora-rank: the reference is the model without adapters; leave it out",
        )
    return found


def reference_is_base(s: Settings) -> bool:
    """See `RunConfig.reference_is_base`."""
    ref, model = s.model.ref_load, s.model.hf_checkpoint
    return s.lora.lora_rank > 0 and (
        ref is None or (model is not None and Path(ref).resolve() == Path(model).resolve())
    )


def adapters_are_supported(s: Settings) -> list[Problem]:
    if not s.lora.lora_rank:
        return []
    rank, found = s.lora.lora_rank, []
    if s.debug.debug_rollout_only:
        found += problem(
            "debug_rollout_only",
            None,
            "does not go with --lora-rank: save the merged model (--save-hf) and sample from that",
        )
    if resolve_transformer_impl(s.model, s.machine) == "transformer_engine":
        found += problem(
            "lora_rank",
            rank,
            "is not supported with Transformer Engine layers yet; use --transformer-impl local",
        )
    for name in ("decoupled_lr", "decoupled_min_lr"):
        if s.core.get(name) is not None:
            found += problem(
                name,
                s.core[name],
                "is for the embedding and the output layer, which --lora-rank leaves as they are; leave it out",
            )
    return found


def targets_are_there(s: Settings) -> list[Problem]:
    """All --lora-target-modules exist in this model, and their merged weights can be synced."""
    folder, names = s.model.hf_checkpoint, s.lora.lora_target_modules
    if not s.lora.lora_rank or folder is None or any(name not in TARGETS for name in names):
        return []
    try:
        model = read_hf_model(folder)
    except ConfigError:  # reported where the model is read
        return []
    strange = _modules_of_others(model)
    found = []
    for name in names:
        if name in strange:
            legal = ", ".join(word for word in TARGETS if word not in strange)
            found += problem(
                "lora_target_modules",
                name,
                f"is no module of {model.architecture}; legal values: {legal}",
            )
        tied = not model.gpt["untie_embeddings_and_output_weights"]
        if (
            TARGETS[name] == UNEMBEDDING
            and tied
            and s.rollout.rollout_engine == "sglang"
            and s.generates
        ):
            message = (
                "shares its weight with the embedding in this model (tie_word_embeddings), and SGLang's servers could not take the merged "
                "weights, where it does not; "
            )
            found += problem(
                "lora_target_modules", name, message + "leave it out, or --rollout-engine local"
            )
    return found


def _modules_of_others(model: HfModel) -> tuple[str, ...]:
    """Names in `TARGETS` that do not occur in this architecture."""
    if not model.transformer.get("multi_latent_attention"):
        parameters = model_families.get(model.architecture).parameters.values()
        others = MLP if any(".w1." in str(mapping) for mapping in parameters) else MIXTRAL_MLP
        stacked = any("gate_up_proj" in str(mapping) for mapping in parameters)
        return (*LATENT_ATTENTION, *others, *(MLP[:2] if stacked else ()))
    queries = ("q_proj",) if model.transformer["q_lora_rank"] else ("q_a_proj", "q_b_proj")
    return (*queries, "k_proj", "v_proj", *MIXTRAL_MLP)


def adapter_to_start_from(s: Settings) -> list[Problem]:
    path, lora = s.lora.lora_adapter_path, s.lora
    if not lora.lora_rank or path is None:
        return []
    try:
        found = read_adapter_config(path)
    except ValueError as error:
        return problem("lora_adapter_path", path, str(error))
    pairs = (
        ("lora_rank", lora.lora_rank, found.rank),
        ("lora_alpha", lora.lora_alpha, found.alpha),
    )
    return [
        p
        for name, here, there in pairs
        if here != there
        for p in problem(name, here, f"is {there:g} in --lora-adapter-path {path}")
    ]


def critics_adapters(s: Settings) -> list[Problem]:
    """A LoRA critic shares the policy's base: conditions of --critic-lora-rank."""
    rank, found = s.critic.critic_lora_rank, []
    if not rank or not has_critic(s):
        return []
    if not s.lora.lora_rank:
        found += problem(
            "critic_lora_rank",
            rank,
            "needs --lora-rank: the critic's adapters stand on the frozen base of the policy's",
        )
    if s.critic.critic_load is not None:
        found += problem(
            "critic_load",
            s.critic.critic_load,
            "does not go with --critic-lora-rank: the critic's base is the policy's; leave it out",
        )
    if critic_parallel(s.critic, s.parallel) != s.parallel:
        flags = ", ".join(flag_name(f"critic_{name}") for name in layout_flags(s.critic))
        found += problem(
            "critic_lora_rank",
            rank,
            f"needs the critic in the policy's layout, whose base it shares; leave out {flags}",
        )
    if s.lora.lora_rank and all(
        TARGETS.get(name) == UNEMBEDDING for name in s.lora.lora_target_modules
    ):
        found += problem(
            "critic_lora_rank",
            rank,
            "finds no layer in --lora-target-modules: a critic has no output layer; add attn or mlp",
        )
    return found


def nothing_to_overlap(s: Settings) -> str | None:
    idle = [
        flag_name(name)
        for name in ("overlap_grad_reduce", "overlap_param_gather")
        if s.core.get(name)
    ]
    if not s.lora.lora_rank or not idle:
        return None
    return f"{' and '.join(idle)} have no effect with --lora-rank: adapters are exchanged at once"


LORA_RULES: tuple[Rule, ...] = (
    adapters_have_a_base, adapters_are_supported, targets_are_there, adapter_to_start_from, critics_adapters,
)  # fmt: skip
