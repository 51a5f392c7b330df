"""Rules about the optimizer and its memory, the learning-rate schedule, and LoRA."""

from __future__ import annotations

import re
from pathlib import Path

from arguments.critic_layout import critic_parallel, layout_flags
from arguments.hf.lora_modules import (
    MERGED,
    absent_modules,
    missing_words,
    padded_mlp,
    target_modules,
    unserved_beside_base,
    without_attention,
)
from arguments.hf.model import HfModel, read_hf_model
from arguments.hf.peft_adapter import read_adapter_config
from arguments.megatron_configs import INITIAL_LOSS_SCALE
from arguments.rules.algorithm import has_critic
from arguments.rules.base import Rule, Settings, Warn, problem
from arguments.schema.lora import (
    ATTENTION,
    LATENT_ATTENTION,
    MIXTRAL_MLP,
    MLP,
    TARGETS,
    UNEMBEDDING,
)
from arguments.untested import FLAG
from arguments.vllm_install import LORA_RANKS
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.engines.registry import engine_traits

# --- optimizer -----------------------------------------------------------------------------------


PRECISE = "use_precision_aware_optimizer"
OFFLOAD = "optimizer_cpu_offload"
TORCH_DTYPES = ("fp32", "bf16")  # dtypes of the moments
# With a larger beta2 a second moment in bf16 cannot decrease: the decrement, 1 - beta2 of its
# value, is less than half of its last bit (2^-9 to 2^-8 of its value).
LARGEST_BETA2_OF_BF16 = 1 - 2**-8
LOSS_SCALE = (
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)


def check_optimizer_dtypes(s: Settings) -> list[Problem]:
    core = s.core
    problems: list[Problem] = []
    if not core.get(PRECISE) or s.machine.transformer_engine:
        return problems
    if s.machine.apex:
        message = (
            "requires Adam of Transformer Engine or torch; with Apex installed megatron-core uses "
            "Apex's, which does not support it"
        )
        problems += problem(PRECISE, None, message)
    legal = {
        "main_params_dtype": ("fp32",),
        "exp_avg_dtype": TORCH_DTYPES,
        "exp_avg_sq_dtype": TORCH_DTYPES,
    }
    for name, dtypes in legal.items():
        if core.get(name, "fp32") not in dtypes:
            message = f"requires Transformer Engine; legal without it: {', '.join(dtypes)}"
            problems += problem(name, core[name], message)
    return problems


def check_main_grads_dtype(s: Settings) -> list[Problem]:
    """--main-grads-dtype agrees with the dtype of the gradient buffers, which the optimizer reads
    directly."""
    name = "main_grads_dtype"
    dtype = s.core.get("main_grads_dtype")
    in_fp32 = s.core.get("grad_reduce_in_fp32")
    if not s.core.get(PRECISE) or dtype is None:
        return []
    if dtype == "bf16" and not s.core.get("bf16"):
        return problem(name, dtype, "requires --bf16")
    if in_fp32 is not None and s.core.get("bf16") and in_fp32 != (dtype == "fp32"):
        other = "--grad-reduce-in-fp32" if in_fp32 else "--no-grad-reduce-in-fp32"
        message = f"conflicts with {other}: both set the dtype of the gradient buffers; remove one"
        return problem(name, dtype, message)
    return []


def check_optimizer_offload(s: Settings) -> list[Problem]:
    """A condition of megatron-core's HybridDeviceOptimizer."""
    fraction = s.core.get("optimizer_offload_fraction", 1.0)
    if not s.core.get(OFFLOAD) or fraction == 1:
        return []
    if not s.machine.cuda or s.machine.transformer_engine:
        return []
    message = "must be 1.0 without Transformer Engine"
    return problem("optimizer_offload_fraction", fraction, message)


def check_loss_scale(s: Settings) -> list[Problem]:
    """fp16 and its loss scale, which have no flags of their own."""
    core = s.core
    fp16 = core.get("fp16")
    found = []
    if fp16 and core.get("bf16"):
        found.append(("fp16", "conflicts with --bf16; set only one of them"))
    if fp16 and core.get("optimizer") == "muon":
        found.append(("fp16", "conflicts with --optimizer muon"))
    for name in LOSS_SCALE:
        if core.get(name) is not None and not fp16:
            found.append((name, "requires fp16:true"))
        if not core.get(name, 1) > 0:
            found.append((name, "must be above 0"))
    low = core.get("min_loss_scale", 1.0)
    if low > core.get("initial_loss_scale", INITIAL_LOSS_SCALE):
        found.append(("min_loss_scale", "must not be above initial_loss_scale"))
    return [Problem(FLAG, f"{name}:{core[name]}", message) for name, message in found]


OPTIMIZER_RULES: tuple[Rule, ...] = (
    check_loss_scale,
    check_optimizer_dtypes,
    check_main_grads_dtype,
    check_optimizer_offload,
)


def warn_bf16_second_moment(s: Settings) -> str | None:
    beta2 = s.core.get("adam_beta2", 0.999)
    if s.core.get("exp_avg_sq_dtype") != "bf16" or beta2 <= LARGEST_BETA2_OF_BF16:
        return None
    return (
        f"--exp-avg-sq-dtype bf16 with --adam-beta2 {beta2}: rounding cancels the decay of the "
        f"second moment, which can only grow; use a beta2 of at most {LARGEST_BETA2_OF_BF16:.3f}"
    )


def warn_offload_without_gpu(s: Settings) -> str | None:
    if not s.core.get(OFFLOAD) or s.machine.cuda:
        return None
    return (
        f"{flag_name(OFFLOAD)} saves nothing without a GPU: parameters and optimizer state are in "
        "host memory already and get a second copy"
    )


OPTIMIZER_WARNINGS: tuple[Warn, ...] = (warn_bf16_second_moment, warn_offload_without_gpu)


# --- learning rate -------------------------------------------------------------------------------


def check_lr(s: Settings) -> list[Problem]:
    if s.core.get("lr") is not None or not s.trains:
        return []
    return problem("lr", None, "required: the learning rate, > 0")


def check_parameter_patterns(s: Settings) -> list[Problem]:
    """Parameter patterns are valid regular expressions."""
    problems = []
    names = ("only_train_params_name_list", "freeze_params_name_list")
    lists = [(name, getattr(s.model, name)) for name in names]
    lists += [(f"critic_{name}", getattr(s.critic, f"critic_{name}")) for name in names]
    for name, patterns in lists:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                problems += problem(name, pattern, f"not a valid regular expression: {error}")
    return problems


def check_critic_warmup(s: Settings) -> list[Problem]:
    """The critic's warm-up ends before its decay, which is stretched to the critic's steps."""
    policy_steps, passes = s.schedule.lr_decay_iters, s.critic.critic_steps_per_policy_step
    warmup = s.critic.critic_lr_warmup_iters
    if not policy_steps or warmup < policy_steps * passes:
        return []
    bound = f"--lr-decay-iters {policy_steps}"
    if passes > 1:
        bound += f" times --critic-steps-per-policy-step {passes}, {policy_steps * passes}"
    return problem("critic_lr_warmup_iters", warmup, f"must be below {bound}")


STEP_RULES: tuple[Rule, ...] = (check_lr, check_parameter_patterns, check_critic_warmup)


# --- lora ----------------------------------------------------------------------------------------


def check_lora_base(s: Settings) -> list[Problem]:
    """LoRA needs a Hugging Face model as frozen base."""
    if not s.lora.lora_rank:
        return []
    problems = []
    load = s.checkpoint.load
    if load is not None and (Path(load) / "config.json").is_file():
        message = (
            "is a Hugging Face model, which is the frozen base with --lora-rank; "
            "set it as --hf-checkpoint"
        )
        problems += problem("load", load, message)
    if s.model.ref_offload and s.reference_is_base:
        message = (
            "has no effect with --lora-rank: the reference is the model without adapters; remove it"
        )
        problems += problem("ref_offload", None, message)
    return problems


def check_lora_targets(s: Settings) -> list[Problem]:
    """All --lora-target-modules exist in this model, and their merged weights can be synced."""
    folder = s.model.hf_checkpoint
    names = s.lora.lora_target_modules
    if not s.lora.lora_rank or folder is None or any(name not in TARGETS for name in names):
        return []
    try:
        model = read_hf_model(folder)
    except ConfigError:  # reported where the model is read
        return []
    missing = missing_words(model)
    tied = not model.gpt["untie_embeddings_and_output_weights"]
    merged_on_servers = (
        engine_traits(s.rollout.rollout_engine).has_servers
        and s.generates
        and s.lora.lora_sync == "merged"
    )
    problems = []
    for name in names:
        if name in missing:
            legal = ", ".join(word for word in TARGETS if word not in missing)
            message = f"no such module in {model.architecture}; legal values: {legal}"
            if (reason := without_attention(model.transformer)) and name in ("all-linear", "attn"):
                message = f"{reason}; legal values: {legal}"
            problems += problem("lora_target_modules", name, message)
        if TARGETS[name] == UNEMBEDDING and tied and merged_on_servers:
            message = (
                "shares its weight with the embedding in this model (tie_word_embeddings), so "
                "SGLang cannot load the merged weight; remove it, or use --lora-sync adapter or "
                "--rollout-engine local"
            )
            problems += problem("lora_target_modules", name, message)
    return problems


def check_lora_sync(s: Settings) -> list[Problem]:
    """The engine can hold the adapters beside the base model."""
    if not s.lora.lora_rank or s.lora.lora_sync != "adapter":
        return []
    traits = engine_traits(s.rollout.rollout_engine)
    if not (traits.takes_adapters and s.generates):
        message = "requires --rollout-engine local, sglang or vllm, and a run that samples"
        return problem("lora_sync", "adapter", message)
    problems = _adapters_of_servers(s) if traits.has_servers else []
    if s.model.hf_checkpoint is not None:
        try:
            model = read_hf_model(s.model.hf_checkpoint)
        except ConfigError:  # reported where the model is read
            return []
        problems += _unserved_adapters(s, model)
    return [p for words in problems for p in problem("lora_sync", "adapter", words)]


def _adapters_of_servers(s: Settings) -> list[str]:
    """Settings of servers that rule adapters out."""
    engine = s.rollout.rollout_engine
    problems = []
    if s.sglang.update_weight_mode == "delta":
        problems.append("sends adapters whole; remove --update-weight-mode delta")
    if engine == "vllm" and s.sglang.update_weight_transport != "disk":
        problems.append("with vLLM requires --update-weight-transport disk; add it")
    if engine == "vllm" and s.lora.lora_rank > LORA_RANKS[-1]:
        problems.append(f"vLLM serves adapters of a rank of at most {LORA_RANKS[-1]}")
    if s.sglang.colocate or s.sglang.offload_rollout:
        problems.append(
            "requires servers that keep their base model: remove --colocate and --offload-rollout"
        )
    if str((s.sglang.sglang_server_flags or {}).get("dp_size", 1)) != "1":
        problems.append("requires servers without data parallelism; remove --sglang-dp-size")
    return problems


def _unserved_adapters(s: Settings, model: HfModel) -> list[str]:
    """What engines do not compute, or what no test has compared with the trainer."""
    names = [name for name in s.lora.lora_target_modules if name in TARGETS]
    modules = set(target_modules(names, model))
    on_servers = engine_traits(s.rollout.rollout_engine).has_servers
    problems = []
    mlp = modules.intersection((*MLP, *MIXTRAL_MLP))
    if model.transformer.get("num_moe_experts") and s.rollout.rollout_engine == "vllm":
        # without a GPU its layer of experts fails as soon as adapters are enabled
        return ["with vLLM serves no mixtures of experts; use sglang, local, or --lora-sync merged"]
    if model.transformer.get("num_moe_experts") and mlp:
        problems.append(
            f"engines apply no adapters to experts ({', '.join(sorted(mlp))}): use "
            "--lora-target-modules attn, or --lora-sync merged"
        )
    elif mlp and s.rollout.rollout_engine == "sglang":
        gpus = s.sglang.rollout_num_gpus_per_engine
        if reason := padded_mlp(model, gpus, cuda=s.machine.cuda):
            problems.append(f"{reason}: use --lora-target-modules attn, or --lora-sync merged")
    latent = model.transformer.get("multi_latent_attention")
    if on_servers and latent and modules.intersection((*ATTENTION, *LATENT_ATTENTION)):
        problems.append(f"servers apply no adapters to multi-latent attention{MERGED}")
    elif s.rollout.rollout_engine == "sglang":
        problems += _incomplete_for_sglang(modules, set(absent_modules(model)))
    return problems + unserved_beside_base(str(s.model.hf_checkpoint), model)


def _incomplete_for_sglang(modules: set[str], absent: set[str]) -> list[str]:
    """SGLang joins the adapters of query, key and value, and those of gate and up projection. It
    fills in a missing k_proj or up_proj alone, and fails over others once requests arrive."""
    problems = []
    for joined, needed in ((ATTENTION[:3], ("q_proj", "v_proj")), (MLP[:2], ("gate_proj",))):
        missing = [name for name in needed if name not in modules | absent]
        if missing and modules.intersection(joined):
            given = ", ".join(name for name in joined if name in modules)
            problems.append(
                f"SGLang serves no adapters of {given} without {' and '.join(missing)}: add "
                f"{' '.join(missing)} to --lora-target-modules, or use --lora-sync merged"
            )
    return problems


def check_lora_adapter_path(s: Settings) -> list[Problem]:
    path = s.lora.lora_adapter_path
    lora = s.lora
    if not lora.lora_rank or path is None:
        return []
    try:
        adapter = read_adapter_config(path)
    except ValueError as error:
        return problem("lora_adapter_path", path, str(error))
    problems = []
    for name, adapters in (("lora_rank", adapter.rank), ("lora_alpha", adapter.alpha)):
        value = getattr(lora, name)
        if value != adapters:
            problems += problem(name, value, f"is {adapters:g} in --lora-adapter-path {path}")
    return problems


def check_critic_lora(s: Settings) -> list[Problem]:
    """A LoRA critic shares the policy's base: conditions of --critic-lora-rank."""
    rank = s.critic.critic_lora_rank
    problems = []
    if not rank or not has_critic(s):
        return []
    if critic_parallel(s.critic, s.parallel) != s.parallel:
        flags = ", ".join(flag_name(f"critic_{name}") for name in layout_flags(s.critic))
        message = (
            f"requires the policy's layout for the critic, whose base it shares; remove {flags}"
        )
        problems += problem("critic_lora_rank", rank, message)
    if s.lora.lora_rank and all(
        TARGETS.get(name) == UNEMBEDDING for name in s.lora.lora_target_modules
    ):
        message = "a critic has no output layer; add attn or mlp to --lora-target-modules"
        problems += problem("critic_lora_rank", rank, message)
    return problems


def warn_lora_overlap(s: Settings) -> str | None:
    names = ("overlap_grad_reduce", "overlap_param_gather")
    flags = [flag_name(name) for name in names if s.core.get(name)]
    if not s.lora.lora_rank or not flags:
        return None
    return f"{' and '.join(flags)} have no effect with --lora-rank: adapters are reduced at once"


LORA_RULES: tuple[Rule, ...] = (
    check_lora_base,
    check_lora_targets,
    check_lora_sync,
    check_lora_adapter_path,
    check_critic_lora,
)
