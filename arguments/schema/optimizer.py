"""Learning-rate and weight-decay schedules. The optimizer is megatron-core's OptimizerConfig."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class ScheduleConfig(CheckedSettings):
    lr_decay_style: str = arg(
        "constant",
        "Shape of the learning rate over the run.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = arg(
        None,
        "Optimizer steps over which the learning rate decays; default: the whole run.",
        legal=POSITIVE,
        idle_without="@schedule_length",
    )
    lr_wsd_decay_iters: int | None = arg(
        None,
        "Length of the annealing phase of WSD, in optimizer steps.",
        legal=POSITIVE,
        only_with="lr_decay_style=WSD",
        required_with="lr_decay_style=WSD",
    )
    lr_wsd_decay_style: str = arg(
        "exponential",
        "Shape of WSD's annealing.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        idle_without="lr_decay_style=WSD",
    )
    lr_warmup_iters: int = arg(
        0, "Optimizer steps of linear warm-up.", legal=NON_NEGATIVE, below="lr_decay_iters"
    )
    lr_warmup_fraction: float | None = arg(
        None,
        "Fraction of the decay steps used for warm-up; excludes --lr-warmup-iters.",
        legal=UNIT,
        excludes="lr_warmup_iters",
    )
    lr_warmup_init: float = arg(
        0.0,
        "Learning rate at which warm-up starts.",
        legal=NON_NEGATIVE,
        at_most="lr",
        idle_without="lr_warmup_iters|lr_warmup_fraction",
    )
    start_weight_decay: float | None = arg(
        None,
        "Initial weight decay of a changing schedule.",
        legal=NON_NEGATIVE,
        only_with="weight_decay_incr_style=linear|weight_decay_incr_style=cosine",
        required_with="weight_decay_incr_style=linear|weight_decay_incr_style=cosine",
    )
    end_weight_decay: float | None = arg(
        None,
        "Final weight decay of a changing schedule.",
        legal=NON_NEGATIVE,
        only_with="weight_decay_incr_style=linear|weight_decay_incr_style=cosine",
        required_with="weight_decay_incr_style=linear|weight_decay_incr_style=cosine",
    )
    weight_decay_incr_style: str = arg(
        "constant",
        "Shape of the weight decay over the run.",
        choices=("constant", "linear", "cosine"),
    )
