"""The loss scale of training in fp16 (--allow-untested fp16:true).

Gradients of activations below 6e-8 vanish in fp16, so the loss is multiplied by a large number and
the gradients are divided by it, in float32, before anything else reads them. An overflow skips the
step and lowers the scale, and many steps without one raise it (Micikevicius et al.,
arXiv 1710.03740, section 3.2).

megatron-core's schedule applies `grad_scale_func` to the loss after our own factors
(forward_step.py) and to the auxiliary losses of experts, and its optimizers unscale. It gives each
part of an optimizer (experts have their own) a scale that follows the overflows of that part, but
multiplies the loss by that of the first part: once they differ, the gradients of the others are
wrong by a power of two. Here all parts share one, which moves once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from torch import Tensor

LOWERED = 0.5
RAISED = 2.0


class LossScale(MegatronGradScaler):
    """One loss scale for all parts of an optimizer, with megatron-core's rules for raising and
    lowering it; constant with `loss_scale` of the config.

    Its state is one tensor [scale, steps without overflow, overflows left before it is lowered],
    so that it moves, is swapped and reset like the model's other tensors.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.constant = bool(config.loss_scale)
        self.lowest = config.min_loss_scale
        self.window = config.loss_scale_window
        self.hysteresis = config.hysteresis
        self.initial = config.loss_scale or config.initial_loss_scale
        super().__init__(self.initial)
        self.state = torch.zeros(3, device=super().scale.device)
        self.reset()

    @property
    def scale(self) -> Tensor:
        """[1] float32."""
        return self.state[:1]

    @property
    def inv_scale(self) -> Tensor:
        """[1] float32."""
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Called by each part of the optimizer for itself; `settle` decides for all."""

    def settle(self, *, overflow: bool) -> None:
        """Take note of a step. overflow: some gradient of the model was not finite."""
        if self.constant:
            return
        scale, clean, left = self.state.unbind()
        if overflow:
            clean.zero_()
            left.sub_(1)
            lowered = (scale * LOWERED).clamp(min=self.lowest)
            scale.copy_(torch.where(left <= 0, lowered, scale))
            return
        clean.add_(1)
        raised = clean >= self.window
        scale.mul_(torch.where(raised, RAISED, 1.0))
        left.copy_(torch.where(raised, float(self.hysteresis), left))
        clean.mul_(~raised)

    def reset(self) -> None:
        """As it was before the first step."""
        self.state.copy_(torch.tensor([self.initial, 0.0, self.hysteresis]))

    def state_dict(self) -> dict[str, Any]:
        """Empty: megatron-core would save it with the state of each part, which a run in another
        layout does not read. trainer.json has `values`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""

    @property
    def values(self) -> list[float]:
        """The state, for a checkpoint."""
        return [float(value) for value in self.state.tolist()]

    def restore(self, values: Sequence[float]) -> None:
        """Go on from the `values` of a checkpoint; this run's constant scale takes precedence."""
        if not self.constant:
            self.state.copy_(torch.tensor(values))


def share_loss_scale(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Replace the scales of an optimizer's parts, if they have any, by a common one."""
    parts = [part for part in _parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    if parts:
        scale = LossScale(config)
        for part in parts:
            part.grad_scaler = scale


def loss_scale_of(optimizer: MegatronOptimizer) -> LossScale | None:
    """The optimizer's loss scale; None for one that has none, as in float32 and bf16."""
    scales = [getattr(part, "grad_scaler", None) for part in _parts(optimizer)]
    return next((scale for scale in scales if isinstance(scale, LossScale)), None)


def loss_scale_state(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The state of the optimizer's loss scale, as tensors."""
    scale = loss_scale_of(optimizer)
    return [] if scale is None else [scale.state]


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
