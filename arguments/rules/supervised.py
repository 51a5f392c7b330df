"""Rules about supervised fine-tuning: what it needs, and what has no effect in it."""

from __future__ import annotations

from arguments.rules.base import TASK_PREFIX, Rule, Settings, problem
from slime_like.config import Problem

# Only evaluation samples and grades.
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
    if "policy_loss_type" in s.given and s.loss.name != "cross_entropy":
        found += problem(
            "policy_loss_type",
            s.algorithm.policy_loss_type,
            "does not go with --loss-type sft_loss; leave it out",
        )
    if s.data.label_key is None and not (s.data.prompt_data or "").startswith(
        TASK_PREFIX
    ):  # such a source names its answers itself
        found += problem(
            "label_key",
            None,
            "is missing: the field that holds the answer to learn (--loss-type sft_loss)",
        )
    return found


def idle_in_supervised_training(s: Settings) -> list[Problem]:
    """Given, and neither off nor 0: settings of sampling and grading, where nothing samples."""
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


def cross_entropy_is_supervised(s: Settings) -> list[Problem]:
    if s.algorithm.loss_type == "sft_loss" or s.loss.name != "cross_entropy":
        return []
    message = "ignores rewards: the policy would imitate whatever it samples; for supervised fine-tuning use --loss-type sft_loss"
    return problem("policy_loss_type", "cross_entropy", message)


SUPERVISED_RULES: tuple[Rule, ...] = (
    supervised_loss,
    idle_in_supervised_training,
    cross_entropy_is_supervised,
)
