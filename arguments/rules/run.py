"""All rules between the settings of a run, in the order in which problems are reported, including
those of KL and reduction; the warnings; and the notes that the launcher prints once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from arguments.critic_layout import check_critic_layout
from arguments.flags import Flag
from arguments.loss_settings import loss_fields
from arguments.rules.advantages import ADVANTAGE_RULES, ADVANTAGE_WARNINGS
from arguments.rules.agents import AGENT_RULES
from arguments.rules.algorithm import (
    CORRECTION_RULES,
    CRITIC_RULES,
    LOSS_RULES,
    SUPERVISED_RULES,
    warn_gmpo_advantages,
    warn_maxrl_rewards,
    warn_sapo_baseline,
    warn_wide_clip_range,
)
from arguments.rules.base import Rule, Settings, Warn, problem
from arguments.rules.data import DATA_RULES, truncates
from arguments.rules.declared import check_declared_rules
from arguments.rules.distillation import DISTILLATION_RULES, warn_zero_reward
from arguments.rules.files import FILE_RULES
from arguments.rules.images import IMAGE_RULES
from arguments.rules.layout import (
    BATCH_FLAGS,
    BATCH_RULES,
    MICRO_BATCH_RULES,
    PARALLEL_RULES,
    global_batch_of,
    warn_attention_sinks,
    warn_mla_context_parallel,
)
from arguments.rules.learning_rate import SCHEDULE_WARNINGS
from arguments.rules.moe import MOE_RULES, MOE_WARNINGS
from arguments.rules.muon import MUON_RULES, warn_muon_blockwise
from arguments.rules.network import NETWORK_RULES
from arguments.rules.on_policy import ON_POLICY_RULES
from arguments.rules.profiling import PROFILING_RULES
from arguments.rules.scheduling import SCHEDULING_RULES
from arguments.rules.served_rewards import SERVED_REWARD_RULES
from arguments.rules.server import reject_server_flags
from arguments.rules.sglang import SGLANG_RULES, warn_few_servers
from arguments.rules.slime import SLIME_RULES
from arguments.rules.training import (
    LORA_RULES,
    OPTIMIZER_RULES,
    OPTIMIZER_WARNINGS,
    STEP_RULES,
    warn_lora_overlap,
)
from arguments.rules.vllm import VLLM_RULES
from arguments.untested import warn_untested
from slime_like.advantages.registry import (
    advantage_estimators,
    compares_samples,
    handles_singletons,
)
from slime_like.config import Problem
from slime_like.losses.registry import policy_losses

# --- run -----------------------------------------------------------------------------------------


def check_reference_model(s: Settings) -> list[Problem]:
    if s.model.ref_load is not None or s.lora.lora_rank or not s.trains:
        return []
    if s.supervised:
        if not s.algorithm.compares_with_reference:
            return []
        flag = f"--policy-loss-type {s.loss.name}"
    elif s.algorithm.use_kl_loss:
        flag = "--use-kl-loss"
    elif s.algorithm.kl_coef:
        flag = "--kl-coef"
    else:
        return []
    message = f"required with {flag}: the reference model, usually the same as --hf-checkpoint"
    return problem("ref_load", None, message)


def check_loss_reduction(s: Settings) -> list[Problem]:
    legal = s.loss.required_reductions
    reduction = s.algorithm.loss_reduction
    if not legal or reduction in legal:
        return []
    message = f"--policy-loss-type {s.loss.name} requires {' or '.join(sorted(legal))}"
    return problem("loss_reduction", reduction, message)


RULES: tuple[Rule, ...] = (
    check_declared_rules,
    *SLIME_RULES,
    *PARALLEL_RULES,
    *NETWORK_RULES,
    *IMAGE_RULES,
    *MOE_RULES,
    *BATCH_RULES,
    *MICRO_BATCH_RULES,
    check_reference_model,
    check_loss_reduction,
    *SUPERVISED_RULES,
    *LOSS_RULES,
    *CORRECTION_RULES,
    *ADVANTAGE_RULES,
    *CRITIC_RULES,
    check_critic_layout,
    *LORA_RULES,
    *DISTILLATION_RULES,
    *STEP_RULES,
    *OPTIMIZER_RULES,
    *MUON_RULES,
    *DATA_RULES,
    *SCHEDULING_RULES,
    *SERVED_REWARD_RULES,
    *AGENT_RULES,
    *SGLANG_RULES,
    *VLLM_RULES,
    *ON_POLICY_RULES,
    *FILE_RULES,
    *PROFILING_RULES,
    reject_server_flags,
)


# --- warnings ------------------------------------------------------------------------------------


def warn_loss_reduction(s: Settings) -> str | None:
    recommended = s.loss.recommended_reductions
    reduction = s.algorithm.loss_reduction
    if not recommended or reduction in recommended or s.supervised:
        return None
    legal = " or ".join(sorted(recommended))
    return (
        f"--policy-loss-type {s.loss.name} is meant for --loss-reduction {legal}, not {reduction}"
    )


def warn_k1_loss(s: Settings) -> str | None:
    a = s.algorithm
    if not a.use_kl_loss or a.kl_loss_type != "k1" or a.use_unbiased_kl:
        return None
    return (
        "--kl-loss-type k1 in the loss has an expected gradient of zero, only noise; "
        "use low_var_kl, k2 or --use-unbiased-kl"
    )


def warn_singleton_groups(s: Settings) -> str | None:
    entry = advantage_estimators.get(s.algorithm.advantage_estimator)
    if s.algorithm.loss_type != "policy_loss" or s.distillation.use_opd:
        return None
    if not compares_samples(entry) or s.rollout.n_samples_per_prompt > 1:
        return None
    others = "an estimator that compares no samples (batch_mean, reinforce_plus_plus, ppo)"
    if not handles_singletons(entry):
        return (
            f"--n-samples-per-prompt 1 with --advantage-estimator {entry.name}: every advantage is "
            f"0, there is nothing to learn from; raise --n-samples-per-prompt, or take {others}"
        )
    if s.algorithm.singleton_advantage == "reward":
        return None
    return (
        "--n-samples-per-prompt 1 with --singleton-advantage zero: every advantage is 0, "
        "there is nothing to learn from; raise --n-samples-per-prompt, or take "
        f"--singleton-advantage reward or {others}"
    )


def warn_single_step(s: Settings) -> str | None:
    if s.supervised or not s.trains or s.algorithm.use_rollout_logprobs:
        return None
    if global_batch_of(s) != s.samples_per_rollout or "old_log_probs" not in s.loss.needs:
        return None
    return (
        f"one optimizer step per rollout: every ratio is 1, so {s.loss.name} is the plain policy "
        "gradient; see --num-steps-per-rollout"
    )


def warn_unbounded_staleness(s: Settings) -> str | None:
    """Warn if nothing bounds how far the policy has moved from the one that sampled."""
    staleness = s.scheduling.staleness
    if staleness <= 1 or s.supervised or not s.trains or s.loss.correction == "masks":
        return None
    if s.algorithm.estr_threshold is not None:
        return None
    if s.algorithm.use_rollout_logprobs and s.loss.bounds_ratio:
        return None
    if not s.algorithm.use_rollout_logprobs and s.off_policy.enabled:
        return None
    problem = "has no bound on its ratio to the policy that sampled"
    if not s.algorithm.use_rollout_logprobs:
        problem = "does not see the policy that sampled"
    return (
        f"--policy-loss-type {s.loss.name} {problem}, and tokens may be {staleness} weight "
        "versions old (--max-staleness); add --tis-ratio-type token, take a loss with a trust "
        "region around the engine's log-probs (dppo_kl, rollout_is, cispo with --cispo-anchor "
        "rollout), or lower --max-staleness to 1"
    )


def warn_truncated_sampling(s: Settings) -> str | None:
    if not s.generates or not truncates(s) or s.rollout.renormalize_sampled_log_probs:
        return None
    return (
        "--rollout-top-p and --rollout-top-k truncate the sampling distribution, and the trainer's "
        "log-probs are over the full vocabulary, so ratios are biased; "
        "see --renormalize-sampled-log-probs"
    )


WARNINGS: tuple[Warn, ...] = (
    warn_untested,
    warn_loss_reduction,
    warn_k1_loss,
    warn_singleton_groups,
    warn_single_step,
    warn_truncated_sampling,
    warn_unbounded_staleness,
    warn_wide_clip_range,
    *ADVANTAGE_WARNINGS,
    warn_gmpo_advantages,
    warn_sapo_baseline,
    warn_few_servers,
    warn_zero_reward,
    *MOE_WARNINGS,
    *OPTIMIZER_WARNINGS,
    *SCHEDULE_WARNINGS,
    warn_maxrl_rewards,
    warn_muon_blockwise,
    warn_lora_overlap,
    warn_attention_sinks,
    warn_mla_context_parallel,
)


def unused_loss_settings(settings: Settings, flags: Mapping[str, Flag]) -> list[str]:
    """Warnings about given settings of losses that were not selected."""
    chosen = loss_fields(settings.loss)
    others = {name for _, loss in policy_losses.items() for name in loss_fields(loss)} - chosen
    return [
        f"{flags[name].name} has no effect with the loss {settings.loss.name}"
        for name in sorted(others & settings.given)
    ]


# --- notes ---------------------------------------------------------------------------------------


def notes_of(s: Settings) -> Iterator[str]:
    """Notes about the run, one line each."""
    if s.agents.agent_function_path is not None and not s.agents.agent_function_isolation:
        yield (
            "episodes of --agent-function-path share this process, so that each can read the keys "
            "and objects of the others; --agent-function-isolation separates them"
        )
    if not s.trains:
        return
    skips = s.rollout.rollout_skip_special_tokens
    if _is_slimes(s) and s.generates and calls_user_functions(s) and skips is None:
        yield (
            "different from slime: sample.response lacks the special token that ended it; add "
            "--no-rollout-skip-special-tokens to keep it"
        )
    if s.algorithm.use_dynamic_batch_size and not BATCH_FLAGS & s.given:
        yield (
            f"micro-batches of up to {s.algorithm.max_tokens_per_gpu} tokens; "
            "see --max-tokens-per-gpu and --micro-batch-size"
        )


def _is_slimes(s: Settings) -> bool:
    """Whether the command line was written for slime. The defaults it expects are set by then."""
    return s.slime.actor_num_nodes is not None or s.slime.actor_num_gpus_per_node is not None


def calls_user_functions(s: Settings) -> bool:
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
