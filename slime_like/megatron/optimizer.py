"""The optimizer, its schedule, and one optimizer step that either happens on all ranks or on none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from arguments.schema import ScheduleConfig


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """megatron-core's optimizer over the wrapped chunks."""
    return get_megatron_optimizer(config, list(chunks))


def build_scheduler(
    optimizer: MegatronOptimizer,
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    *,
    total_steps: int,
) -> OptimizerParamScheduler:
    """Learning rate and weight decay in units of optimizer steps. total_steps: optimizer steps of
    the whole run."""
    decay_steps = schedule.lr_decay_iters or total_steps
    if schedule.lr_warmup_fraction is not None:
        warmup_steps = int(schedule.lr_warmup_fraction * decay_steps)
    else:
        warmup_steps = schedule.lr_warmup_iters
    weight_decay = config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, warmup_steps + 1),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=weight_decay
        if schedule.start_weight_decay is None
        else schedule.start_weight_decay,
        end_wd=weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # the command line rules; see `resume_schedule`
    )


def resume_schedule(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> list[str]:
    """Go on at the saved step under this run's settings; returns words about each setting that the
    checkpoint has otherwise."""
    ours = scheduler.state_dict()
    scheduler.load_state_dict(saved)
    return [
        f"{name} {ours[name]} (checkpoint: {saved[name]})"
        for name in ours
        if name != "num_steps" and ours[name] != saved.get(name)
    ]


LIMITS = ("max_lr", "min_lr", "start_wd", "end_wd")


@contextmanager
def limits_kept(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Loading an optimizer's state brings the checkpoint's learning-rate limits into its parameter
    groups; this keeps the run's own."""
    ours = [
        {name: group[name] for name in LIMITS if name in group} for group in optimizer.param_groups
    ]
    yield
    for group, limits in zip(optimizer.param_groups, ours, strict=True):
        group.update(limits)


@torch.no_grad()
def step_if_finite(
    optimizer: MegatronOptimizer, allowed: Callable[[], bool] | None = None
) -> tuple[bool, float]:
    """Clip and step, unless the gradient norm is not finite; returns (stepped, global L2 norm
    before clipping).

    The norm is reduced over all ranks that hold a part of the model, and gradients are equal on
    data-parallel ranks, so all ranks take the same branch. A skipped step leaves weights and
    optimizer state bit-unchanged.

    allowed: asked once gradients are clipped and ready, on all ranks with one answer; the step is
    skipped where it is False.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return False, grad_norm
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        parameters = part.get_parameters()
        if part.config.clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    if allowed is not None and not allowed():
        return False, grad_norm
    return bool(optimizer.step_with_ready_grads()), grad_norm
