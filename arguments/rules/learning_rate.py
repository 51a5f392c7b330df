"""Rules about the numbers of an optimizer step, and about the learning rate and the weight decay
over a run."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem, flag_name


def learning_rate(s: Settings) -> list[Problem]:
    lr, min_lr = s.core.get("lr"), s.core.get("min_lr")
    if lr is None:
        return problem("lr", None, "is missing: the learning rate, > 0") if s.trains else []
    if lr <= 0:
        return problem("lr", lr, "must be > 0")
    if min_lr is not None and not 0 <= min_lr <= lr:
        return problem("min_lr", min_lr, f"must be between 0 and --lr {lr}")
    return []


def optimizer_numbers(s: Settings) -> list[Problem]:
    found = []
    for name in ("weight_decay", "clip_grad"):
        if s.core.get(name, 0.0) < 0:
            found += problem(name, s.core[name], "must be >= 0")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if not 0 <= s.core.get(name, 0.0) < 1:
            found += problem(name, s.core[name], "must be 0 <= x < 1")
    if s.core.get("adam_eps", 1.0) <= 0:
        found += problem("adam_eps", s.core["adam_eps"], "must be > 0")
    return found


def warmup(s: Settings) -> list[Problem]:
    iters, decay = s.schedule.lr_warmup_iters, s.schedule.lr_decay_iters
    if decay is not None and iters >= decay:
        return problem("lr_warmup_iters", iters, f"must be below --lr-decay-iters {decay}")
    lr = s.core.get("lr")
    if lr is not None and s.schedule.lr_warmup_init > lr:
        return problem("lr_warmup_init", s.schedule.lr_warmup_init, f"must not be above --lr {lr}")
    return []


def wsd(s: Settings) -> list[Problem]:
    if s.schedule.lr_decay_style == "WSD" and s.schedule.lr_wsd_decay_iters is None:
        return problem(
            "lr_wsd_decay_iters",
            None,
            "is missing; --lr-decay-style WSD needs the length of its annealing",
        )
    return []


def weight_decay_schedule(s: Settings) -> list[Problem]:
    start, end, style = (
        s.schedule.start_weight_decay,
        s.schedule.end_weight_decay,
        s.schedule.weight_decay_incr_style,
    )
    if style == "constant" and (start is not None or end is not None):
        name = "start_weight_decay" if start is not None else "end_weight_decay"
        return problem(
            name,
            getattr(s.schedule, name),
            "needs --weight-decay-incr-style linear or cosine; for a constant one use --weight-decay",
        )
    if style != "constant" and (start is None or end is None):
        return problem(
            "weight_decay_incr_style", style, "needs --start-weight-decay and --end-weight-decay"
        )
    return []


def overlap(s: Settings) -> list[Problem]:
    found = []
    if s.core.get("overlap_param_gather"):
        for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not s.core.get(name):
                found += problem("overlap_param_gather", None, f"needs {flag_name(name)}; add it")
    return found


STEP_RULES: tuple[Rule, ...] = (learning_rate, optimizer_numbers)
LEARNING_RATE_RULES: tuple[Rule, ...] = (warmup, wsd, weight_decay_schedule, overlap)
