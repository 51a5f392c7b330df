"""Rules about low-rank adapters."""

from __future__ import annotations

from pathlib import Path

from arguments.critic_layout import critic_parallel, layout_flags
from arguments.hf.model import HfModel, read_hf_model
from arguments.hf.peft_adapter import read_adapter_config
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.critic import has_critic
from arguments.schema.lora import LATENT_ATTENTION, MIXTRAL_MLP, MLP, TARGETS, UNEMBEDDING
from slime_like.config import ConfigError, Problem, flag_name


def adapters_have_a_base(s: Settings) -> list[Problem]:
    """Adapters name the modules of a Hugging Face model, which stays as it is."""
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
    """Every name is of this model."""
    folder, names = s.model.hf_checkpoint, s.lora.lora_target_modules
    if not s.lora.lora_rank or folder is None or any(name not in TARGETS for name in names):
        return []
    try:
        model = read_hf_model(folder)
    except ConfigError:  # told where the model is read
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
    """Names in `TARGETS` that modules of other architectures have."""
    if not model.transformer.get("multi_latent_attention"):
        return (
            *LATENT_ATTENTION,
            *(MLP if model.architecture == "MixtralForCausalLM" else MIXTRAL_MLP),
        )
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
    """They stand on the policy's base."""
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
