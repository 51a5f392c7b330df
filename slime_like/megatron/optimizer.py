"""The optimizer, its schedule and state, and per-step settings of a caller (Tinker)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor

from arguments.schema import ScheduleConfig
from megatron_patches.offload_ckpt import init_offloaded_state
from megatron_patches.torch_adam_ckpt import init_adam_state
from slime_like.distributed.collectives import gather
from slime_like.megatron.loss_scale import share_loss_scale
from slime_like.megatron.model.vision import TOWER_PARAMETER
from slime_like.megatron.muon import build_muon, init_momentum, is_muon

LARGEST_UPDATE = 1e38  # close to the float32 maximum of 3.4e38
LARGEST_FP16 = 65504.0


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """megatron-core's optimizer over the wrapped chunks."""
    if config.optimizer == "muon":
        return build_muon(config, chunks)
    overrides = group_overrides(config, tower_learning_rate(chunks))
    optimizer = get_megatron_optimizer(config, list(chunks), overrides)
    share_loss_scale(optimizer, config)
    return optimizer


def tower_learning_rate(chunks: Sequence[DistributedDataParallel]) -> float | None:
    """The vision tower's own learning rate, also on ranks without the tower; None if it has
    none."""
    vision = getattr(unwrap_model(chunks[0]), "vision_settings", None)
    return None if vision is None or not vision.trained else vision.learning_rate


def group_overrides(
    config: OptimizerConfig, tower: float | None
) -> dict[ParamKey, dict[str, float]]:
    """megatron-core's settings of parameter groups, and those of the vision tower.

    A checkpoint's groups are told apart by some of their settings, of which the learning rate is
    none; `is_decoupled_lr` is.

    Args:
        tower: The tower's learning rate, if it has its own.
    """
    overrides: dict[ParamKey, dict[str, float]] = {}
    for key, own in get_standard_config_overrides(config).items():
        overrides[key] = {**own, **({"is_decoupled_lr": 1} if "max_lr" in own else {})}
    if tower is not None:
        smallest = (config.min_lr or 0.0) * tower / config.lr
        own = {"max_lr": tower, "min_lr": smallest, "is_decoupled_lr": 2}
        overrides[ParamKey(attr=TOWER_PARAMETER)] = own
    return overrides


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
    start_wd = schedule.start_weight_decay
    end_wd = schedule.end_weight_decay
    start_wd = config.weight_decay if start_wd is None else start_wd
    end_wd = config.weight_decay if end_wd is None else end_wd
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, warmup_steps + 1),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        # the command line takes precedence; see `resume_schedule`
        override_opt_param_scheduler=True,
    )


def resume_schedule(scheduler: OptimizerParamScheduler, saved: dict[str, object]) -> list[str]:
    """Resume at the saved step with this run's settings; returns a description of each setting that
    differs from the checkpoint."""
    current = scheduler.state_dict()
    scheduler.load_state_dict(saved)
    return [
        f"{name} {current[name]} (checkpoint: {saved[name]})"
        for name in current
        if name != "num_steps" and current[name] != saved.get(name)
    ]


# the last two are one setting of Muon, by release
OWN_SETTINGS = (
    *("max_lr", "min_lr", "start_wd", "end_wd", "betas", "eps"),
    *("momentum", "momentum_beta"),
)


@contextmanager
def keep_own_settings(optimizer: MegatronOptimizer) -> Iterator[list[str]]:
    """Keep the run's settings while loading an optimizer state, which would overwrite those in the
    parameter groups: the command line takes precedence, whatever the layout. Yields a list that has
    a description of each setting of Adam that differs afterwards."""
    kept = []
    for group in optimizer.param_groups:
        kept.append({name: group[name] for name in OWN_SETTINGS if name in group})
    changes: list[str] = []
    yield changes
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        for name in ("betas", "eps"):
            own, saved = settings.get(name), group.get(name)
            if own is not None and np.any(np.not_equal(own, saved)):
                changes.append(f"Adam's {name} {own} (checkpoint: {saved})")
        group.update(settings)


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Caller-defined settings of one optimizer step, instead of a schedule."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled; not applied to biases and norms, as in Megatron
    max_norm: float  # gradient clipping by global L2 norm, 0 for none


def set_adam(optimizer: MegatronOptimizer, adam: AdamStep) -> None:
    """Set the optimizer's settings for its next step."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.config.clip_grad = adam.max_norm
    for group in optimizer.param_groups:
        group["lr"] = adam.learning_rate * group.get("lr_mult", 1.0)
        group["betas"] = (adam.beta1, adam.beta2)
        group["eps"] = adam.eps
        group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)


def step_stays_finite(optimizer: MegatronOptimizer, adam: AdamStep) -> bool:
    """Whether no weight, in the model's precision, or moment, in float32, can overflow in this
    step on any rank. Collective.

    Bounds of Adam (Kingma and Ba, algorithm 1) with decoupled weight decay, from the largest
    absolute values of weights w, gradients g and moments m, v:
    |m'| <= b1 |m| + (1 - b1) |g|, v' <= b2 v + (1 - b2) g^2,
    |w'| <= (1 + lr wd) |w| + lr |m'| / ((1 - b1^t) eps).
    """
    largest_weight = LARGEST_FP16 if optimizer.config.fp16 else LARGEST_UPDATE
    finite = True
    for plain in plain_optimizers(optimizer):
        for group in plain.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [plain.state[p] for p in params]
            if not params:
                continue
            weight = max_abs(params)
            gradient = max_abs([p.grad for p in params])
            first = max_abs([s["exp_avg"] for s in states])
            first = adam.beta1 * first + (1 - adam.beta1) * gradient
            second = adam.beta2 * max_abs([s["exp_avg_sq"] for s in states])
            step = float(states[0].get("step", group.get("step", 0))) + 1
            scale = group["lr"] / ((1 - adam.beta1**step) * group["eps"])
            weight = (1 + group["lr"] * group["weight_decay"]) * weight + scale * first
            second += (1 - adam.beta2) * gradient * gradient
            # a NaN is not <= anything
            finite = finite and weight <= largest_weight and second <= LARGEST_UPDATE
    return all(gather(finite))


def plain_optimizers(optimizer: object) -> list[MegatronOptimizer]:
    """torch's optimizers inside megatron-core's wrappers."""
    if optimizer is None:
        return []
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        part.optimizer
        for part in parts
        if part.optimizer is not None and not getattr(part, "is_stub_optimizer", False)
    ]


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Create the state that an optimizer otherwise creates in its first step. Raises TypeError for
    an optimizer whose state is not known here."""
    for plain in plain_optimizers(optimizer):
        if isinstance(plain, HybridDeviceOptimizer):
            init_offloaded_state(plain)
        elif isinstance(plain, torch.optim.Adam | torch.optim.AdamW):
            init_adam_state(plain)
        elif is_muon(plain):
            init_momentum(plain)
        elif is_fused_adam(plain):
            init_fused_state(plain)
        else:
            kind = f"{type(plain).__module__}.{type(plain).__name__}"
            raise TypeError(f"the state of the optimizer {kind} is not known")


def is_fused_adam(plain: torch.optim.Optimizer) -> bool:
    """Whether it is the Adam of Transformer Engine or Apex: no class of torch's, moments by the
    same names, and one step count for each parameter group, in the group."""
    return type(plain).__name__ == "FusedAdam"


def init_fused_state(plain: Any) -> None:
    """Create the initial state of every parameter of a FusedAdam that has none yet."""
    for group in plain.param_groups:
        for parameter in group["params"]:
            if plain.state[parameter]:
                continue
            if hasattr(plain, "initialize_state"):  # Transformer Engine's, of several dtypes
                plain.initialize_state(parameter, False)  # no remainders, see _optimizer
            else:
                plain.state[parameter] = {
                    name: torch.zeros_like(parameter, dtype=torch.float32)
                    for name in ("exp_avg", "exp_avg_sq")
                }


def restart_fused_main_parameters(optimizer: MegatronOptimizer) -> None:
    """Copy the parameters, which were overwritten, into the main parameters that Transformer
    Engine's Adam keeps among its state; megatron-core's `reload_model_params` leaves these as they
    were, and the next step would write them back."""
    for plain in plain_optimizers(optimizer):
        if not is_fused_adam(plain):
            continue
        for parameter, state in plain.state.items():
            if "master_param" in state:
                plain.set_scaled_state(parameter, "master_param", parameter.detach().float())


def group_steps(optimizer: MegatronOptimizer) -> list[Any]:
    """Step counts that a FusedAdam keeps by parameter group; None for a group that has taken none,
    and for other optimizers, which keep theirs among `moments`."""
    return [group.get("step") for group in _fused_groups(optimizer)]


def set_group_steps(optimizer: MegatronOptimizer, steps: Sequence[Any] | None) -> None:
    """Set what `group_steps` returned; None for the counts of a fresh optimizer."""
    groups = _fused_groups(optimizer)
    for group, step in zip(groups, steps or [None] * len(groups), strict=True):
        if step is None:
            group.pop("step", None)
        else:
            group["step"] = step


def _fused_groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    fused = filter(is_fused_adam, plain_optimizers(optimizer))
    return [group for plain in fused for group in plain.param_groups]


def main_parameters(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The optimizer's main parameters, this rank's shard."""
    return [p.data for _, p in _optimizer_parameters(optimizer)]


def moments(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The optimizer's moments and step counts, this rank's shard. A FusedAdam has its counts
    elsewhere, see `group_steps`."""
    tensors = []
    for plain, parameter in _optimizer_parameters(optimizer):
        # by name, because loading changes their order
        values = [value for _, value in sorted(plain.state[parameter].items())]
        tensors += [value for value in values if isinstance(value, Tensor)]
        # of moments that Transformer Engine's Adam stores in fp16 or fp8
        scales = getattr(plain, "_scales", {}).get(parameter, {})
        tensors += [scale for _, scale in sorted(scales.items())]
    return tensors


def _optimizer_parameters(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    for plain in plain_optimizers(optimizer):
        for group in plain.param_groups:
            for parameter in group["params"]:
                yield plain, parameter


def max_abs(values: Sequence[Tensor]) -> float:
    """The largest absolute value; NaN if there is a NaN, 0 for no tensors. They may be on several
    devices: torch's Adam has its step counts on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in values:
        if tensor.numel() and tensor.is_floating_point():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    largest = [0.0]
    for tensors in by_device.values():
        norms = [norm.double() for norm in torch._foreach_norm(tensors, math.inf)]
        largest.append(float(torch.stack(norms).max()))
    return float(torch.tensor(largest, dtype=torch.float64).max())  # unlike max(), keeps a NaN
