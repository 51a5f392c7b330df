"""Warnings about schedules that do not fit the length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from arguments.rules.base import Settings, Warn
from arguments.rules.layout import global_batch_of
from arguments.run_config import RunConfig
from arguments.schema import CriticConfig, ScheduleConfig

EARLY = 0.9  # a decay that ends at 0 before this share of the run leaves steps that learn nothing


def schedule_warnings(schedule: ScheduleConfig, min_lr: float | None, steps: int) -> Iterator[str]:
    """What is wrong with the policy's schedule in a run of `steps` optimizer steps."""
    decay = schedule.lr_decay_iters or steps
    warmup, name = schedule.lr_warmup_iters, f"--lr-warmup-iters {schedule.lr_warmup_iters}"
    if schedule.lr_warmup_fraction is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
        name = f"--lr-warmup-fraction {schedule.lr_warmup_fraction:g} of --lr-decay-iters {decay}"
    if warmup >= steps > 0:
        yield (
            f"{name}: the run has {steps} optimizer steps, all of them warm-up, so that the "
            "learning rate never reaches --lr"
        )
    annealing = schedule.lr_wsd_decay_iters
    if annealing is not None and annealing > decay - warmup:
        yield (
            f"--lr-wsd-decay-iters {annealing}: only {max(0, decay - warmup)} steps are left after "
            "the warm-up, so that the annealing starts in the middle"
        )
    falls = schedule.lr_decay_style in ("linear", "cosine", "WSD")
    if falls and not min_lr and decay < EARLY * steps:
        yield (
            f"--lr-decay-iters {decay}: the learning rate is 0 from then on, and the run has "
            f"{steps} optimizer steps, of which the last {steps - decay} change nothing; raise it, "
            "or set --min-lr"
        )


def critic_warnings(critic: CriticConfig, steps: int) -> Iterator[str]:
    """What is wrong with the critic's schedule, in a run with `steps` train batches."""
    steps *= critic.critic_steps_per_policy_step
    if critic.critic_lr_warmup_iters >= steps > 0:
        yield (
            f"--critic-lr-warmup-iters {critic.critic_lr_warmup_iters}: the run has {steps} "
            "optimizer steps, so that the critic's learning rate never reaches --critic-lr"
        )


def run_warnings(config: RunConfig, train_batches: int) -> Iterator[str]:
    """For a run with a length that only its data tell (--num-epoch)."""
    per_rollout = config.algorithm.num_steps_per_rollout or 1
    steps = config.critic.policy_steps(train_batches, per_rollout)
    yield from schedule_warnings(config.schedule, config.megatron.optimizer.min_lr, steps)
    if config.trains_critic:
        yield from critic_warnings(config.critic, train_batches)


def _train_batches(s: Settings) -> tuple[int, int]:
    """Train batches of the run and of a rollout; 0 if only the data tell, or nothing is trained."""
    batch = global_batch_of(s)
    if s.rollout.num_rollout is None or not s.trains or not batch:
        return 0, 0
    per_rollout = s.samples_per_rollout // batch
    return s.rollout.num_rollout * per_rollout, per_rollout


def warn_schedule(s: Settings) -> str | None:
    if not (steps := s.critic.policy_steps(*_train_batches(s))):
        return None
    return "; ".join(schedule_warnings(s.schedule, s.core.get("min_lr"), steps)) or None


def warn_critic_schedule(s: Settings) -> str | None:
    if not (steps := _train_batches(s)[0]):
        return None
    return "; ".join(critic_warnings(s.critic, steps)) or None


SCHEDULE_WARNINGS: tuple[Warn, ...] = (warn_schedule, warn_critic_schedule)
