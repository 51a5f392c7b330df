"""The critic's loss: squared error to the returns, clipped as in PPO.

Clipping: Schulman et al.'s PPO2 code (the paper, arXiv 1707.06347, has none); the factor 1/2 is
that of Gaussian regression.

    clipped = V_old + clip(V - V_old, -value_clip, value_clip)
    l       = value_loss_scale max((V - return)^2, (clipped - return)^2)
    L       = sum_t mask_t u_t l_t

Values are never divided by the sampling temperature: they are no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import upcast
from slime_like.losses.total import LossOutput
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.validation import require_mask, require_shape


@dataclass(frozen=True, slots=True)
class ValueLossConfig(CheckedSettings):
    value_clip: float = arg(
        0.2,
        "How far a value may move from that of the rollout, towards its return, before its "
        "gradient ends; a large number: no clipping.",
        legal=POSITIVE,
    )
    value_loss_scale: float = arg(
        0.5, "Factor of the critic's squared error (slime's is 1.0).", legal=POSITIVE
    )


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """Tensors of one shape, [T] packed or [B, T] padded. All but values are constants. Rows where
    `loss_mask` is False are never used, NaN included. A return that is NaN is no target: its token
    has no loss, and the denominators in `loss_weights` stay."""

    values: Tensor  # current critic, with grad
    old_values: Tensor  # before the rollout's first update
    returns: Tensor
    loss_mask: Tensor  # bool
    loss_weights: Tensor  # u: 1 / denominator of the reduction, over the whole optimizer step

    def __post_init__(self) -> None:
        for name in ("values", "old_values", "returns", "loss_weights"):
            require_shape(name, getattr(self, name), self.loss_mask, "loss_mask")
        require_mask("loss_mask", self.loss_mask)

    @property
    def targets(self) -> Tensor:
        """Tokens with a target."""
        return require_mask("loss_mask", self.loss_mask) & ~self.returns.isnan()


def value_loss(inputs: ValueInputs, config: ValueLossConfig) -> LossOutput:
    """The partial loss of these tokens.

    Args:
        inputs: [T] or [B, T] tensors; without a token the loss is 0, with a gradient.
        config: Clipping and scale.

    Returns:
        The loss, 0-d with grad, and its metrics: value_loss, the loss itself (a sum), and those of
        `token_value_losses`.
    """
    token_losses, metrics = token_value_losses(inputs, config)
    weights = upcast(inputs.loss_weights.detach())
    weights = torch.where(inputs.targets, weights, 0.0)
    loss = (weights * token_losses).sum()
    return LossOutput(loss, {"value_loss": Metric("sum", loss.detach().clone()), **metrics})


def token_value_losses(
    inputs: ValueInputs, config: ValueLossConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Losses of one shape with the inputs, not weighted, 0 where there is no target; and metrics.

    Means over tokens with a target: value_clipfrac, values that moved further than value_clip;
    value_clip_active, those of them whose clipped branch is the larger one, so that they get no
    gradient; value_diff_abs, |V - V_old|, which vanishes in the first optimizer step of a rollout.
    Computed in fp32 (fp64 stays).
    """
    mask = inputs.targets

    def masked(x: Tensor) -> Tensor:
        """Masked before any product, because NaN * 0 is NaN."""
        return torch.where(mask, upcast(x), 0.0)

    values = masked(inputs.values)
    old = masked(inputs.old_values.detach())
    returns = masked(inputs.returns.detach())
    moved = values - old
    beyond = moved.detach().abs() > config.value_clip
    error = (values - returns).square()
    # within the range both branches must be equal, but old + (values - old) may round
    clipped = torch.where(beyond, old + moved.clamp(-config.value_clip, config.value_clip), values)
    clipped_error = (clipped - returns).square()
    metrics = {
        "value_clipfrac": masked_mean(beyond.float(), mask),
        "value_clip_active": masked_mean((beyond & (clipped_error > error)).float(), mask),
        "value_diff_abs": masked_mean(moved.abs(), mask),
    }
    return config.value_loss_scale * torch.maximum(error, clipped_error), metrics
