"""PPO's clipped surrogate, with clip-higher and dual clip; settings and surrogate are shared by the
losses with a clipped or bounded ratio.

PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7. Clip-higher: DAPO, arXiv 2503.14476,
equation 8. Dual clip: Ye et al. 2019, arXiv 1912.09729, equation 8.

    l = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high))
    l = min(l, -eps_clip_c A)      if A < 0 and eps_clip_c is set
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_like.config import ABOVE_ONE, NON_NEGATIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import Metric, masked_mean


@dataclass(frozen=True, slots=True)
class RangeConfig(CheckedSettings):
    eps_clip: float = arg(0.2, "The ratio is bounded below by 1 - this.", legal=NON_NEGATIVE)
    eps_clip_high: float | None = arg(
        None, "The ratio is bounded above by 1 + this; default: --eps-clip.", legal=NON_NEGATIVE
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return 1 - self.eps_clip, 1 + high


@dataclass(frozen=True, slots=True)
class ClipConfig(RangeConfig):
    eps_clip_c: float | None = arg(
        None,
        "Dual clip: bound on the loss of negative advantages, as a ratio; default: off.",
        legal=ABOVE_ONE,
    )


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The clipped surrogate of a micro-batch."""

    token_losses: Tensor  # [T]
    clipped: Tensor  # [T] bool, the clipped branch is strictly above the unclipped one
    metrics: Mapping[str, Metric]


def clipped_surrogate(inputs: LossInputs, ratio: Tensor, config: ClipConfig) -> Surrogate:
    """max(-A r, -A clip(r)), bounded by -c A where A < 0 and the dual clip is on. ratio: [T], with
    gradient.

    pg_clipfrac: share of active tokens that are clipped; pg_clipfrac_lower: of those that the dual
    clip bounds.
    """
    advantages = inputs.required("advantages")
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(*config.bounds)
    losses = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    metrics = {"pg_clipfrac": masked_mean(clipped, inputs.loss_mask)}
    if config.eps_clip_c is not None:
        bound = -config.eps_clip_c * advantages
        below = (advantages < 0) & (losses > bound)
        metrics["pg_clipfrac_lower"] = masked_mean(below, inputs.loss_mask)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return Surrogate(losses, clipped, metrics)


@dataclass(frozen=True, slots=True)
class PPOConfig(ClipConfig):
    pass


@register_policy_loss(
    "ppo",
    PPOConfig,
    needs=("advantages", "old_log_probs"),
    alias_defaults={"dual_clip": {"eps_clip_c": 3.0}},
    aliases=("regular", "vanilla", "dual_clip"),
)
def ppo(inputs: LossInputs, config: PPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens whose clipped branch is strictly above
    the unclipped one."""
    ratio = inputs.log_ratio().exp()
    surrogate = clipped_surrogate(inputs, ratio, config)
    metrics = {**ratio_metrics(inputs, ratio), **surrogate.metrics}
    return PolicyLossOutput(surrogate.token_losses, metrics)
