"""Rules and warnings about losses, the off-policy correction, supervised fine-tuning and the
critic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from arguments.hf.hub import download_hint
from arguments.rules.base import TASK_PREFIX, Rule, Settings, import_problem, problem, reject
from arguments.rules.declared import has_critic
from arguments.rules.files import NO_MODEL
from arguments.rules.layout import global_batch_of
from arguments.rules.rows import file_of, first_is_text
from arguments.schema import CriticConfig, DataConfig
from arguments.schema.data import learns_conversations
from slime_like.advantages.registry import (
    OutcomeEstimator,
    advantage_estimators,
    compares_samples,
    needs_critic,
)
from slime_like.checkpoints.folders import has_model
from slime_like.config import Problem, flag_name
from slime_like.losses.off_policy_config import OffPolicyConfig

# --- off-policy correction -----------------------------------------------------------------------

CORRECTIONS = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
    "rejection_metric",
    "m2po_threshold",
    "custom_tis_function_path",
)
CUSTOM_TIS_SETTINGS = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "token_tis_ratio_clip_low",
    "custom_tis_function_path",
)


def first_correction(config: OffPolicyConfig) -> str:
    """The flag of a correction that is on."""
    return flag_name(next(name for name in CORRECTIONS if getattr(config, name) is not None))


def check_correction_policies(s: Settings) -> list[Problem]:
    if not (s.off_policy.enabled and s.algorithm.use_rollout_logprobs):
        return []
    message = (
        f"conflicts with {first_correction(s.off_policy)}: the old log-probs are the rollout "
        "engine's, so there is nothing to correct; remove one of them"
    )
    return problem("use_rollout_logprobs", None, message)


def check_correction_loss(s: Settings) -> list[Problem]:
    if not s.off_policy.enabled:
        return []
    if s.supervised or s.loss.correction == "forbidden":
        name = "cross_entropy" if s.supervised else s.loss.name
        message = f"cannot be combined with the loss {name}, which has no old policy; remove it"
        return [Problem(first_correction(s.off_policy), None, message)]
    if s.off_policy.weights and s.loss.correction == "masks":
        has_tis = s.off_policy.tis_ratio_type is not None
        field = "tis_ratio_type" if has_tis else "custom_tis_function_path"
        message = (
            f"cannot be combined with --policy-loss-type {s.loss.name}: its ratio is against the "
            "rollout engine, so the mismatch would count double; remove it or use masks"
        )
        return problem(field, getattr(s.off_policy, field), message)
    return []


def check_custom_tis(s: Settings) -> list[Problem]:
    path = s.off_policy.custom_tis_function_path
    if path is None or s.off_policy.tis_ratio_type != "token":
        return []
    for field in dataclasses.fields(OffPolicyConfig):
        if field.name in s.given and field.name not in CUSTOM_TIS_SETTINGS:
            message = f"computes weights and masks itself; remove {flag_name(field.name)}"
            return problem("custom_tis_function_path", path, message)
    return import_problem("custom_tis_function_path", path)


CORRECTION_RULES: tuple[Rule, ...] = (
    check_correction_policies,
    check_correction_loss,
    check_custom_tis,
)


# --- losses --------------------------------------------------------------------------------------


WIDE_FOR_A_GEOMETRIC_MEAN = 0.01


def check_loss_masks(s: Settings) -> list[Problem]:
    """The masks that are computed with the loss."""
    if not (s.supervised or s.loss.correction == "forbidden"):
        return []
    message = f"cannot be combined with the loss {s.loss.name}, which has no old policy; remove it"
    problems = []
    if s.algorithm.use_opsm:
        problems += problem("use_opsm", None, message)
    if s.algorithm.estr_threshold is not None:
        problems += problem("estr_threshold", s.algorithm.estr_threshold, message)
    return problems


def check_legacy_reduction(s: Settings) -> list[Problem]:
    size = global_batch_of(s)
    dp = s.data_parallel_size
    micro = s.algorithm.micro_batch_size
    if s.algorithm.loss_reduction != "token_mean_legacy" or size is None or dp is None:
        return []
    if size % (dp * micro) == 0 or s.algorithm.use_dynamic_batch_size:  # has its own rule
        return []
    message = (
        f"requires equal micro-batches, and the {size} samples of an optimizer step are not "
        f"divisible by {dp} data-parallel ranks x {micro}; use token_mean"
    )
    return problem("loss_reduction", "token_mean_legacy", message)


def check_entropy_bounds(s: Settings) -> list[Problem]:
    """The adaptive entropy coefficient starts between its bounds."""
    a = s.algorithm
    if a.entropy_ctrl_type != "adaptive":
        return []
    if a.entropy_coef_min > a.entropy_coef_max:
        return []  # a declared rule
    if not a.entropy_coef_min <= a.entropy_coef <= a.entropy_coef_max:
        message = (
            "is the initial value of --entropy-ctrl-type adaptive; "
            f"must be from {a.entropy_coef_min:g} to {a.entropy_coef_max:g}"
        )
        return problem("entropy_coef", a.entropy_coef, message)
    return []


LOSS_RULES: tuple[Rule, ...] = (check_entropy_bounds, check_loss_masks, check_legacy_reduction)


def warn_wide_clip_range(s: Settings) -> str | None:
    if not s.loss.sequence_ratio:
        return None
    widest = max(s.policy_loss.eps_clip, s.policy_loss.eps_clip_high or 0.0)
    if widest <= WIDE_FOR_A_GEOMETRIC_MEAN:
        return None
    return (
        f"{s.loss.name}'s ratio is a geometric mean over the sequence, close to 1: a clip range of "
        f"{widest:g} never acts; try --eps-clip {s.loss.config_type().eps_clip:g}"
    )


def warn_gmpo_advantages(s: Settings) -> str | None:
    """Warn if gmpo is used with an estimator that gives tokens of a sample different advantages;
    outcome estimators do not, even with whitening."""
    name = s.algorithm.advantage_estimator
    if s.loss.name != "gmpo" or isinstance(advantage_estimators.get(name), OutcomeEstimator):
        return None
    return (
        "--policy-loss-type gmpo is defined for one advantage per sequence, and "
        f"--advantage-estimator {name} has one per token"
    )


SIGNED_REWARDS = ("dapo",)  # 1 and -1


def warn_maxrl_rewards(s: Settings) -> str | None:
    name, rewards = s.algorithm.advantage_estimator, s.reward.rm_type
    if name != "maxrl" or rewards not in SIGNED_REWARDS or s.reward.custom_rm_path is not None:
        return None
    return (
        "--advantage-estimator maxrl divides by the mean reward of a group, and --rm-type "
        f"{rewards} gives 1 and -1: groups with at most half of the answers right have no "
        "advantage, and others a large one; use rewards of 0 and 1 (--rm-type math), or grpo"
    )


def warn_sapo_baseline(s: Settings) -> str | None:
    """Warn if sapo is used with an estimator without a group baseline: its temperatures are meant
    for group-centred advantages."""
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if s.loss.name != "sapo" or (compares_samples(entry) and not needs_critic(entry)):
        return None
    reason = "takes its baseline from a critic" if needs_critic(entry) else "has no group"
    return (
        "--policy-loss-type sapo is defined for group-relative advantages, and "
        f"--advantage-estimator {name} {reason}; see --advantage-estimator grpo"
    )


# --- supervised ----------------------------------------------------------------------------------


# In supervised fine-tuning only the evaluation reads these.
OF_SAMPLING = (
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_stop",
    "rollout_stop_token_ids",
)
OF_REWARDS = ("rm_type", "custom_rm_path", "reward_key")


def check_supervised_loss(s: Settings) -> list[Problem]:
    if not s.supervised:
        return []
    problems = []
    supervised = s.loss.name == "cross_entropy" or s.loss.pairs or s.loss.mismatched
    if "policy_loss_type" in s.given and not supervised:
        message = "cannot be combined with --loss-type sft_loss; remove it"
        problems += problem("policy_loss_type", s.algorithm.policy_loss_type, message)
    conversations = not s.loss.pairs and learns_conversations(s.algorithm.loss_type, s.data)
    if conversations and any(_first_is_text(data) for data in s.data_configs):
        message = "required with --loss-type sft_loss: the field with the answer to train on"
        problems += problem("label_key", None, message)
    if s.data.loss_mask_type is not None and s.data.label_key is not None:
        message = (
            "cannot be combined with --label-key, which trains on the label only; "
            "set only one of them"
        )
        problems += problem("loss_mask_type", s.data.loss_mask_type, message)
    return problems


def _first_is_text(data: DataConfig) -> bool:
    return first_is_text(file_of(data.prompt_data or ""), data.input_key)


def check_unused_supervised_flags(s: Settings) -> list[Problem]:
    """Sampling and reward settings have no effect in supervised fine-tuning without evaluation."""
    if not s.supervised or s.evaluates:
        return []
    unused = {name: getattr(s.rollout, name) for name in OF_SAMPLING if name in s.given}
    unused |= {name: getattr(s.reward, name) for name in OF_REWARDS if name in s.given}
    return reject(
        unused, "has no effect with --loss-type sft_loss without --eval-interval; remove it"
    )


def _without_answers(s: Settings) -> list[Problem]:
    message = "compares given answers; use --loss-type sft_loss"
    return problem("policy_loss_type", s.algorithm.policy_loss_type, message)


def _tasks(s: Settings, lacks: str) -> list[Problem]:
    """Tasks of reasoning_gym among the prompts, which have no given answers."""
    problems = []
    for data in s.data_configs:
        if (data.prompt_data or "").startswith(TASK_PREFIX):
            message = f"{lacks}; use a .jsonl or .parquet file"
            problems += problem("prompt_data", data.prompt_data, message)
    return problems


def check_pair_loss(s: Settings) -> list[Problem]:
    """A preference loss needs --loss-type sft_loss and a file of answer pairs."""
    if not s.loss.pairs:
        return []
    if not s.supervised:
        return _without_answers(s)
    problems = _tasks(s, "has no pairs of answers")
    if s.data.label_key is not None:
        message = "has no effect with pairs of answers (--chosen-key, --rejected-key); remove it"
        problems += problem("label_key", s.data.label_key, message)
    return problems


def check_single_answers(s: Settings) -> list[Problem]:
    """KTO needs answers with a verdict, and a whole optimizer step for its reference point."""
    if not s.loss.mismatched:
        return []
    if not s.supervised:
        return _without_answers(s)
    problems = []
    if s.data.desirable_key is None:
        message = "required with --loss-type kto_loss: the field that says whether an answer is "
        problems += problem("desirable_key", None, message + "desirable")
    problems += _tasks(s, "does not say which answers are desirable")
    if s.rollout.rollout_batch_size < 2:
        message = "must be above 1 with --loss-type kto_loss: the reference point compares rows"
        problems += problem("rollout_batch_size", s.rollout.rollout_batch_size, message)
    size = global_batch_of(s)
    if size is not None and size != s.samples_per_rollout:
        message = (
            "must be 1 with --loss-type kto_loss: its reference point is of the policy before the "
            "step"
        )
        problems += problem("num_steps_per_rollout", s.algorithm.num_steps_per_rollout, message)
    return problems


def check_cross_entropy(s: Settings) -> list[Problem]:
    if s.supervised or s.loss.name != "cross_entropy":
        return []
    message = (
        "ignores rewards and would imitate every sampled response; "
        "for supervised fine-tuning use --loss-type sft_loss"
    )
    return problem("policy_loss_type", "cross_entropy", message)


SUPERVISED_RULES: tuple[Rule, ...] = (
    check_supervised_loss,
    check_unused_supervised_flags,
    check_pair_loss,
    check_single_answers,
    check_cross_entropy,
)


# --- critic --------------------------------------------------------------------------------------


def completed_critic(s: Settings) -> CriticConfig:
    """Complete the critic's settings; unchanged without a critic."""
    lr = s.core.get("lr")
    min_lr = s.core.get("min_lr") or 0.0
    critic = s.critic
    if not has_critic(s) or lr is None:
        return critic
    critic_lr = critic.critic_lr
    critic_min_lr = critic.critic_min_lr
    if critic_lr is None:
        critic_lr = lr
    if critic_min_lr is None:
        critic_min_lr = min_lr / lr * critic_lr
    return dataclasses.replace(critic, critic_lr=critic_lr, critic_min_lr=critic_min_lr)


def check_critic_load(s: Settings) -> list[Problem]:
    path = s.critic.critic_load
    if path is None or not has_critic(s):
        return []
    if not Path(path).is_dir():
        return problem("critic_load", path, f"no such folder{download_hint(path)}")
    return [] if has_model(path) else problem("critic_load", path, NO_MODEL)


CRITIC_RULES: tuple[Rule, ...] = (check_critic_load,)
