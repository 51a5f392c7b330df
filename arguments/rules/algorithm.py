"""Rules and warnings about advantages, losses, the off-policy correction, supervised fine-tuning
and the critic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from arguments.rules.base import TASK_PREFIX, Rule, Settings, problem
from arguments.rules.declared import has_critic
from arguments.rules.layout import global_batch_of
from arguments.rules.rows import file_of, first_is_text
from arguments.schema import CriticConfig
from arguments.schema.data import learns_conversations
from slime_like.advantages.registry import (
    OutcomeEstimator,
    advantage_estimators,
    compares_samples,
    needs_critic,
)
from slime_like.checkpoints.folders import is_checkpoint_root
from slime_like.config import Problem, flag_name
from slime_like.import_utils import load_function
from slime_like.losses.off_policy_config import OffPolicyConfig

# --- algorithm -----------------------------------------------------------------------------------


# --- off-policy correction -------------------------------------------------------------------------------------------

CUSTOM_TIS_TAKES = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "token_tis_ratio_clip_low",
    "custom_tis_function_path",
)


def first_correction(config: OffPolicyConfig) -> str:
    """The flag of a correction that is on."""
    keys = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
            "token_mask_is_threshold_low", "token_mask_is_threshold_high", "rejection_metric", "m2po_threshold", "custom_tis_function_path")  # fmt: skip
    return flag_name(next(key for key in keys if getattr(config, key) is not None))


def correction_has_two_policies(s: Settings) -> list[Problem]:
    if s.off_policy.enabled and s.algorithm.use_rollout_logprobs:
        message = f"contradicts {first_correction(s.off_policy)}: the old log-probs are the sampler's, so there is nothing to correct; leave one out"
        return problem("use_rollout_logprobs", None, message)
    return []


def correction_fits_the_loss(s: Settings) -> list[Problem]:
    if not s.off_policy.enabled:
        return []
    if s.algorithm.loss_type == "sft_loss" or s.loss.correction == "forbidden":
        name = "cross_entropy" if s.algorithm.loss_type == "sft_loss" else s.loss.name
        found = Problem(
            first_correction(s.off_policy),
            None,
            f"does not go with the loss {name}, which has no old policy; leave it out",
        )
        return [found]
    if s.off_policy.weights and s.loss.correction == "masks":
        name = (
            "tis_ratio_type"
            if s.off_policy.tis_ratio_type is not None
            else "custom_tis_function_path"
        )
        message = f"does not go with --policy-loss-type {s.loss.name}, whose ratio is against the sampler: the mismatch would count double"
        return problem(name, getattr(s.off_policy, name), f"{message}; leave it out, or use masks")
    return []


def correction_bounds(s: Settings) -> list[Problem]:
    """low <= high for all bounds, and settings that belong together are both set."""
    return s.off_policy.conflicts()


def custom_tis(s: Settings) -> list[Problem]:
    path = s.off_policy.custom_tis_function_path
    if path is None:
        return []
    if s.off_policy.tis_ratio_type != "token":
        return problem("custom_tis_function_path", path, "has no effect without --use-tis; add it")
    others = [
        f.name
        for f in dataclasses.fields(OffPolicyConfig)
        if f.name in s.given and f.name not in CUSTOM_TIS_TAKES
    ]
    if others:
        return problem(
            "custom_tis_function_path",
            path,
            f"makes weights and masks itself; leave {flag_name(others[0])} out",
        )
    try:
        load_function(path, "--custom-tis-function-path")
    except ValueError as error:
        return problem(
            "custom_tis_function_path",
            path,
            str(error).removeprefix(f"--custom-tis-function-path {path!r}: "),
        )
    return []


CORRECTION_RULES: tuple[Rule, ...] = (
    correction_has_two_policies,
    correction_fits_the_loss,
    correction_bounds,
    custom_tis,
)


# --- losses --------------------------------------------------------------------------------------


WIDE_FOR_A_GEOMETRIC_MEAN = 0.01


def sequence_mask(s: Settings) -> list[Problem]:
    if not s.algorithm.use_opsm:
        return []
    if s.algorithm.loss_type == "sft_loss" or s.loss.correction == "forbidden":
        return problem(
            "use_opsm",
            None,
            f"does not go with the loss {s.loss.name}, which has no old policy; leave it out",
        )
    return []


def legacy_needs_even_micro_batches(s: Settings) -> list[Problem]:
    size, dp, micro = global_batch_of(s), s.data_parallel_size, s.algorithm.micro_batch_size
    if (
        s.algorithm.loss_reduction != "token_mean_legacy"
        or size is None
        or dp is None
        or size % (dp * micro) == 0
    ):
        return []
    if s.algorithm.use_dynamic_batch_size:
        return []  # has its own rule
    message = f"needs an optimizer step of whole micro-batches, and {size} samples are not divisible by {dp} data-parallel ranks x {micro}"
    return problem("loss_reduction", "token_mean_legacy", f"{message}; use token_mean")


def entropy_bounds(s: Settings) -> list[Problem]:
    """The adaptive entropy coefficient starts between its bounds."""
    a = s.algorithm
    if a.entropy_ctrl_type != "adaptive":
        return []
    if a.entropy_coef_min > a.entropy_coef_max:
        message = f"must not be above --entropy-coef-max {a.entropy_coef_max:g}"
        return problem("entropy_coef_min", a.entropy_coef_min, message)
    if not a.entropy_coef_min <= a.entropy_coef <= a.entropy_coef_max:
        message = f"is where the adaptive coefficient starts; it must be from {a.entropy_coef_min:g} to {a.entropy_coef_max:g}"
        return problem("entropy_coef", a.entropy_coef, message)
    return []


LOSS_RULES: tuple[Rule, ...] = (
    entropy_bounds,
    sequence_mask,
    legacy_needs_even_micro_batches,
)


def wide_gspo_range(s: Settings) -> str | None:
    if not s.loss.sequence_ratio:
        return None
    widest = max(s.policy_loss.eps_clip, s.policy_loss.eps_clip_high or 0.0)
    if widest <= WIDE_FOR_A_GEOMETRIC_MEAN:
        return None
    usual = s.loss.config_type().eps_clip
    return (
        f"{s.loss.name}'s ratio is a geometric mean over the sequence, close to 1: a clip range of {widest:g} never acts; "
        f"try --eps-clip {usual:g}"
    )


def gmpo_needs_one_advantage(s: Settings) -> str | None:
    """Warn if gmpo is used with an estimator that gives tokens of a sample different advantages;
    outcome estimators do not, even with whitening."""
    name = s.algorithm.advantage_estimator
    if s.loss.name != "gmpo" or isinstance(advantage_estimators.get(name), OutcomeEstimator):
        return None
    return f"gmpo is defined for one advantage in each sequence, and --advantage-estimator {name} gives each token its own"


def sapo_needs_a_group(s: Settings) -> str | None:
    """Warn if sapo is used with an estimator without a group baseline: its temperatures are meant
    for group-centred advantages."""
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if s.loss.name != "sapo" or (compares_samples(entry) and not needs_critic(entry)):
        return None
    why = "takes its baseline from a critic" if needs_critic(entry) else "has no group"
    return (
        f"--policy-loss-type sapo is defined for advantages of a group, and "
        f"--advantage-estimator {name} {why}; see --advantage-estimator grpo"
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


def supervised_loss(s: Settings) -> list[Problem]:
    if s.algorithm.loss_type != "sft_loss":
        return []
    found = []
    if "policy_loss_type" in s.given and s.loss.name != "cross_entropy" and not s.loss.pairs:
        found += problem(
            "policy_loss_type",
            s.algorithm.policy_loss_type,
            "does not go with --loss-type sft_loss; leave it out",
        )
    conversations = not s.loss.pairs and learns_conversations(s.algorithm.loss_type, s.data)
    if conversations and first_is_text(file_of(s.data.prompt_data or ""), s.data.input_key):
        found += problem(
            "label_key",
            None,
            "is missing: the field that holds the answer to learn (--loss-type sft_loss)",
        )
    if s.data.loss_mask_type is not None and s.data.label_key is not None:
        found += problem(
            "loss_mask_type",
            s.data.loss_mask_type,
            "excludes --label-key, with which no turn of a conversation is learnt; give one of them",
        )
    return found


def idle_in_supervised_training(s: Settings) -> list[Problem]:
    """Sampling and reward settings have no effect in supervised fine-tuning without evaluation."""
    if s.algorithm.loss_type != "sft_loss" or s.evaluates:
        return []
    idle = {name: getattr(s.rollout, name) for name in OF_SAMPLING} | {
        name: getattr(s.reward, name) for name in OF_REWARDS
    }
    words = (
        "has no effect with --loss-type sft_loss without evaluation (--eval-interval); leave it out"
    )
    return [
        p
        for name, value in idle.items()
        if name in s.given and value
        for p in problem(name, None if value is True else value, words)
    ]


def pairs_are_supervised(s: Settings) -> list[Problem]:
    """A preference loss needs --loss-type sft_loss and a file of answer pairs."""
    if s.algorithm.loss_type != "sft_loss" and s.loss.pairs:
        message = "compares given answers; use --loss-type sft_loss"
        return problem("policy_loss_type", s.algorithm.policy_loss_type, message)
    if not s.loss.pairs:
        return []
    found = []
    if (s.data.prompt_data or "").startswith(TASK_PREFIX):
        found += problem("prompt_data", s.data.prompt_data, "has no pairs of answers; name a file")
    if s.data.label_key is not None:
        message = "has no effect with pairs of answers (--chosen-key, --rejected-key); leave it out"
        found += problem("label_key", s.data.label_key, message)
    return found


def noise_of_labels(s: Settings) -> list[Problem]:
    if s.loss.name != "dpo" or not s.policy_loss.dpo_label_smoothing:
        return []
    if s.policy_loss.dpo_loss_type in ("sigmoid", "robust"):
        return []
    message = f"has no effect with --dpo-loss-type {s.policy_loss.dpo_loss_type}; leave it out"
    return problem("dpo_label_smoothing", s.policy_loss.dpo_label_smoothing, message)


def reward_models_have_no_vocabulary(s: Settings) -> list[Problem]:
    """Settings that a model with a scalar head does not support."""
    if not s.algorithm.trains_reward_model:
        return []
    why = f"--policy-loss-type {s.loss.name}"
    cannot = {
        "eval_interval": (s.eval.eval_interval, f"samples responses, which {why} has no model for"),
        "lora_rank": (s.lora.lora_rank, f"does not go with {why}, which trains all weights"),
        "mtp_num_layers": (s.gpt.mtp_num_layers, f"predicts tokens, which {why} does not"),
    }
    return [
        p
        for name, (value, message) in cannot.items()
        if value
        for p in problem(name, value, f"{message}; leave it out")
    ]


def cross_entropy_is_supervised(s: Settings) -> list[Problem]:
    if s.algorithm.loss_type == "sft_loss" or s.loss.name != "cross_entropy":
        return []
    message = "ignores rewards: the policy would imitate whatever it samples; for supervised fine-tuning use --loss-type sft_loss"
    return problem("policy_loss_type", "cross_entropy", message)


SUPERVISED_RULES: tuple[Rule, ...] = (
    supervised_loss,
    idle_in_supervised_training,
    pairs_are_supervised,
    noise_of_labels,
    reward_models_have_no_vocabulary,
    cross_entropy_is_supervised,
)


# --- critic --------------------------------------------------------------------------------------


def completed_critic(s: Settings) -> CriticConfig:
    """Complete the critic's settings; unchanged without a critic."""
    lr, min_lr, critic = s.core.get("lr"), s.core.get("min_lr") or 0.0, s.critic
    if not has_critic(s) or lr is None:
        return critic
    critic_lr = lr if critic.critic_lr is None else critic.critic_lr
    critic_min_lr = (
        min_lr / lr * critic_lr if critic.critic_min_lr is None else critic.critic_min_lr
    )
    return dataclasses.replace(critic, critic_lr=critic_lr, critic_min_lr=critic_min_lr)


def critic_learning_rate(s: Settings) -> list[Problem]:
    lr, low = s.critic.critic_lr or s.core.get("lr"), s.critic.critic_min_lr
    if lr is None or low is None or low <= lr:
        return []
    name = "--lr" if s.critic.critic_lr is None else "--critic-lr"
    return problem("critic_min_lr", low, f"must not be above {name} {lr:g}")


def critic_warmup(s: Settings) -> list[Problem]:
    iters, decay = s.critic.critic_lr_warmup_iters, s.schedule.lr_decay_iters
    if decay is None or iters < decay:
        return []
    return problem("critic_lr_warmup_iters", iters, f"must be below --lr-decay-iters {decay}")


def critic_only_steps(s: Settings) -> list[Problem]:
    steps, rollouts = s.critic.num_critic_only_steps, s.rollout.num_rollout
    if rollouts is None or steps <= rollouts:
        return []
    return problem(
        "num_critic_only_steps", steps, f"is more than the {rollouts} rollouts of --num-rollout"
    )


def critic_source(s: Settings) -> list[Problem]:
    path = s.critic.critic_load
    if path is None or not has_critic(s):
        return []
    if not Path(path).is_dir():
        return problem("critic_load", path, "no such folder")
    if not is_checkpoint_root(path) and not (Path(path) / "config.json").is_file():
        return problem(
            "critic_load", path, "holds neither checkpoints nor a Hugging Face model (config.json)"
        )
    return []


CRITIC_RULES: tuple[Rule, ...] = (
    critic_learning_rate, critic_warmup, critic_only_steps, critic_source,
)  # fmt: skip
