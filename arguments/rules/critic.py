"""Rules about the critic, and its settings with all that follows from the others filled in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from arguments.rules.base import Rule, Settings, problem
from arguments.schema import CriticConfig
from slime_like.advantages.registry import advantage_estimators, needs_critic
from slime_like.checkpoints.folders import is_checkpoint_root
from slime_like.config import Problem
from slime_like.losses.value_loss import ValueLossConfig

SETTINGS = (
    "lambd",
    *(f.name for config in (CriticConfig, ValueLossConfig) for f in dataclasses.fields(config)),
)


def has_critic(s: Settings) -> bool:
    return s.algorithm.loss_type != "sft_loss" and needs_critic(
        advantage_estimators.get(s.algorithm.advantage_estimator)
    )


def completed_critic(s: Settings) -> CriticConfig:
    """Without a critic, as it stands."""
    lr, min_lr, critic = s.core.get("lr"), s.core.get("min_lr") or 0.0, s.critic
    if not has_critic(s) or lr is None:
        return critic
    critic_lr = lr if critic.critic_lr is None else critic.critic_lr
    critic_min_lr = (
        min_lr / lr * critic_lr if critic.critic_min_lr is None else critic.critic_min_lr
    )
    return dataclasses.replace(critic, critic_lr=critic_lr, critic_min_lr=critic_min_lr)


def critic_settings_have_a_critic(s: Settings) -> list[Problem]:
    if has_critic(s):
        return []
    names = [name for name in SETTINGS if name in s.given]
    return [
        p
        for name in names
        for p in problem(
            name, None, "goes with --advantage-estimator ppo only, which has a critic; leave it out"
        )
    ]


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
    critic_settings_have_a_critic, critic_learning_rate, critic_warmup, critic_only_steps, critic_source,
)  # fmt: skip
