"""The critic of --advantage-estimator ppo. The settings of its loss are declared in slime_like/losses/value_loss.py; its layout is the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, POSITIVE, arg


@dataclass(frozen=True, slots=True)
class CriticConfig:
    critic_load: str | None = arg(
        None,
        "What the critic starts from: a Hugging Face folder, with a value head or without, or a folder with checkpoints of an earlier run's "
        "critic; default: the policy's weights. A resumed run goes on with the critic that was saved with the policy.",
    )
    critic_lr: float | None = arg(None, "Learning rate of the critic; default: --lr.", legal=POSITIVE)
    critic_min_lr: float | None = arg(
        None, "Where the critic's learning rate ends; default: the share of --critic-lr that --min-lr is of --lr.", legal=NON_NEGATIVE
    )
    critic_lr_warmup_iters: int = arg(0, "Optimizer steps of linear warm-up of the critic's learning rate.", legal=NON_NEGATIVE)
    num_critic_only_steps: int = arg(
        0, "The first rollouts, on which the critic alone is trained: the policy and the engine stay as they are.", legal=NON_NEGATIVE
    )
