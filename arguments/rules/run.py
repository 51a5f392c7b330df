"""All rules between the settings of a run, in the order in which problems are reported, including
those of KL and reduction; the warnings; and the notes that the launcher prints once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from arguments.critic_layout import critic_layout_is_possible
from arguments.flags import Flag
from arguments.resolve_loss import loss_fields
from arguments.rules.advantages import (
    ADVANTAGE_RULES,
    gdpo_of_one_reward,
    idle_advantage_settings,
)
from arguments.rules.agents import AGENT_RULES
from arguments.rules.algorithm import (
    CORRECTION_RULES,
    CRITIC_RULES,
    LOSS_RULES,
    SUPERVISED_RULES,
    gmpo_needs_one_advantage,
    sapo_needs_a_group,
    wide_gspo_range,
)
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.data import DATA_RULES, DISTILLATION_RULES, nothing_to_learn, truncates
from arguments.rules.declared import declared_rules
from arguments.rules.files import FILE_RULES
from arguments.rules.layout import (
    BATCH_RULES,
    BY_SAMPLES,
    BY_TOKENS,
    MICRO_BATCH_RULES,
    PARALLEL_RULES,
    global_batch_of,
    latent_attention_with_context_parallel,
)
from arguments.rules.moe import MOE_RULES, MOE_WARNINGS
from arguments.rules.muon import MUON_RULES, blocks_of_the_layout
from arguments.rules.network import NETWORK_RULES
from arguments.rules.profiling import PROFILING_RULES
from arguments.rules.scheduling import SCHEDULING_RULES
from arguments.rules.server import only_the_server_has_these
from arguments.rules.sglang import SGLANG_RULES
from arguments.rules.slime import SLIME_RULES
from arguments.rules.training import (
    LEARNING_RATE_RULES,
    LORA_RULES,
    OPTIMIZER_RULES,
    OPTIMIZER_WARNINGS,
    STEP_RULES,
    nothing_to_overlap,
)
from slime_like.advantages.registry import advantage_estimators, compares_samples
from slime_like.config import Problem
from slime_like.losses.registry import policy_losses

# --- run -----------------------------------------------------------------------------------------


def kl_in_one_place(s: Settings) -> list[Problem]:
    if s.algorithm.kl_coef and s.algorithm.kl_loss_coef:
        return problem(
            "kl_coef",
            s.algorithm.kl_coef,
            f"and --kl-loss-coef {s.algorithm.kl_loss_coef} are both non-zero; choose one",
        )
    return []


def kl_needs_a_reference(s: Settings) -> list[Problem]:
    needs = (
        "--use-kl-loss" if s.algorithm.use_kl_loss else "--kl-coef" if s.algorithm.kl_coef else None
    )
    if s.algorithm.loss_type == "sft_loss":
        compares = s.algorithm.compares_with_reference
        needs = f"--policy-loss-type {s.loss.name}" if compares else None
    if needs is None or s.model.ref_load is not None or s.lora.lora_rank or not s.trains:
        return []
    return problem(
        "ref_load",
        None,
        f"is missing; {needs} needs a reference model, usually the same folder as --hf-checkpoint",
    )


def reduction_fits_the_loss(s: Settings) -> list[Problem]:
    required = s.loss.required_reductions
    if required and s.algorithm.loss_reduction not in required:
        return problem(
            "loss_reduction",
            s.algorithm.loss_reduction,
            f"--policy-loss-type {s.loss.name} needs {' or '.join(sorted(required))}",
        )
    return []


RULES: tuple[Rule, ...] = (
    declared_rules, *SLIME_RULES,
    *PARALLEL_RULES, *NETWORK_RULES, *MOE_RULES, *BATCH_RULES, *MICRO_BATCH_RULES,
    kl_in_one_place, kl_needs_a_reference, reduction_fits_the_loss, *SUPERVISED_RULES, *LOSS_RULES,
    *CORRECTION_RULES, *ADVANTAGE_RULES, *CRITIC_RULES, critic_layout_is_possible, *LORA_RULES, *DISTILLATION_RULES,
    *STEP_RULES, *OPTIMIZER_RULES, *MUON_RULES, *LEARNING_RATE_RULES, *DATA_RULES, *SCHEDULING_RULES, *AGENT_RULES, *SGLANG_RULES, *FILE_RULES, *PROFILING_RULES, only_the_server_has_these,
)  # fmt: skip


# --- warnings --------------------------------------------------------------------------------------------------------

Warn = Callable[[Settings], str | None]


def reduction_is_recommended(s: Settings) -> str | None:
    recommended = s.loss.recommended_reductions
    if (
        not recommended
        or s.algorithm.loss_reduction in recommended
        or s.algorithm.loss_type == "sft_loss"
    ):
        return None
    return f"--policy-loss-type {s.loss.name} is meant for --loss-reduction {' or '.join(sorted(recommended))}, not {s.algorithm.loss_reduction}"


def k1_in_the_loss(s: Settings) -> str | None:
    if (
        s.algorithm.use_kl_loss
        and s.algorithm.kl_loss_type == "k1"
        and not s.algorithm.use_unbiased_kl
    ):
        return "--kl-loss-type k1 in the loss has an expected gradient of zero, only noise; use low_var_kl, k2 or --use-unbiased-kl"
    return None


def groups_of_one(s: Settings) -> str | None:
    compares = compares_samples(advantage_estimators.get(s.algorithm.advantage_estimator))
    single = s.rollout.n_samples_per_prompt == 1 and s.algorithm.singleton_advantage == "zero"
    if (
        s.algorithm.loss_type == "policy_loss"
        and compares
        and single
        and not s.distillation.use_opd
    ):
        return "--n-samples-per-prompt 1 with --singleton-advantage zero: every advantage is 0 and nothing is learnt"
    return None


def ratios_are_one(s: Settings) -> str | None:
    if s.algorithm.loss_type == "sft_loss" or not s.trains or s.algorithm.use_rollout_logprobs:
        return None
    if global_batch_of(s) == s.samples_per_rollout and "old_log_probs" in s.loss.needs:
        return f"one optimizer step per rollout: every ratio is 1, so {s.loss.name} is the plain policy gradient; see --num-steps-per-rollout"
    return None


def truncated_sampling(s: Settings) -> str | None:
    if not s.generates or not truncates(s) or s.rollout.renormalize_sampled_log_probs:
        return None
    return (
        "--rollout-top-p or --rollout-top-k truncates what is sampled; the trainer's log-probs are over the whole vocabulary, so ratios are off; "
        "see --renormalize-sampled-log-probs"
    )


WARNINGS: tuple[Warn, ...] = (
    reduction_is_recommended, k1_in_the_loss, groups_of_one, ratios_are_one, truncated_sampling,
    wide_gspo_range, gdpo_of_one_reward, gmpo_needs_one_advantage, sapo_needs_a_group, idle_advantage_settings, nothing_to_learn,
    *MOE_WARNINGS, *OPTIMIZER_WARNINGS, blocks_of_the_layout, nothing_to_overlap, latent_attention_with_context_parallel,
)  # fmt: skip


def settings_of_other_losses(settings: Settings, table: Mapping[str, Flag]) -> list[str]:
    """Warnings about given settings of losses that were not selected."""
    chosen = loss_fields(settings.loss)
    others = {name for _, loss in policy_losses.items() for name in loss_fields(loss)} - chosen
    return [
        f"{table[name].name} has no effect: it is not a setting of the loss {settings.loss.name}"
        for name in sorted(others & settings.given)
    ]


# --- notes ---------------------------------------------------------------------------------------


def notes_of(s: Settings) -> Iterator[str]:
    """Notes about the run, one line each."""
    if not s.trains:
        return
    if parts := list(_other_defaults(s)):
        yield f"different from slime under the same flags: {'; '.join(parts)}"
    cut = {*BY_SAMPLES, *BY_TOKENS, "use_dynamic_batch_size"}
    if s.algorithm.use_dynamic_batch_size and not cut & s.given:
        yield (
            f"micro-batches of up to {s.algorithm.max_tokens_per_gpu} tokens; "
            "see --max-tokens-per-gpu and --micro-batch-size"
        )


def _other_defaults(s: Settings) -> Iterator[str]:
    if "bf16" not in s.given:
        yield "float32 (slime: bf16; add --bf16)"
    if "use_distributed_optimizer" not in s.given and s.core.get("optimizer", "adam") == "adam":
        yield "optimizer state on every rank (slime: sharded; add --use-distributed-optimizer)"
    if s.generates and calls_users_functions(s):
        yield "sample.response has no special tokens (slime keeps them)"


def calls_users_functions(s: Settings) -> bool:
    """Whether a user function gets samples."""
    return any(
        path is not None
        for path in (
            s.reward.custom_rm_path,
            s.scheduling.custom_generate_function_path,
            s.scheduling.rollout_function_path,
            s.scheduling.dynamic_sampling_filter_path,
            s.scheduling.rollout_sample_filter_path,
            s.hooks.custom_convert_samples_to_train_data_path,
        )
    )
