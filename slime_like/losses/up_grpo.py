"""UP: unbounded positive asymmetric optimisation, arXiv 2607.06987, equations 14 and 15 (UP-GRPO).

    l = -A exp(log_prob - sg(log_prob))                                   where A > 0
        min(max(-A r, -A clip(r, 1 - eps_clip, inf)), -eps_clip_c A)      elsewhere

With a positive advantage there is neither a bound nor an old policy: the ratio is 1 in value, with
the gradient of the log-prob, so that a rare correct token gets its full gradient in every optimizer
step. Where A <= 0 it is PPO with the dual clip; PPO's upper bound never acts there, so there is no
--eps-clip-high.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_like.config import ABOVE_ONE, NON_NEGATIVE, CheckedSettings, arg
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.ppo import ClipConfig, clipped_surrogate
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class UPConfig(CheckedSettings):
    eps_clip: float = arg(0.2, "The ratio is bounded below by 1 - this.", legal=NON_NEGATIVE)
    eps_clip_c: float = arg(
        3.0, "Dual clip: bound on the loss of negative advantages, as a ratio.", legal=ABOVE_ONE
    )


@register_policy_loss("up", UPConfig, needs=("advantages", "old_log_probs"), aliases=("up_grpo",))
def up(inputs: LossInputs, config: UPConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens that are clipped, all of which have a
    negative advantage."""
    advantages = inputs.required("advantages")
    log_probs = inputs.masked(inputs.log_probs)
    ratio = inputs.log_ratio().exp()
    clip = ClipConfig(eps_clip=config.eps_clip, eps_clip_c=config.eps_clip_c)
    negative = replace(inputs, advantages=advantages.clamp(max=0))
    surrogate = clipped_surrogate(negative, ratio, clip)
    own_ratio = (log_probs - log_probs.detach()).exp()
    losses = surrogate.token_losses - advantages.clamp(min=0) * own_ratio
    return PolicyLossOutput(losses, {**ratio_metrics(inputs, ratio), **surrogate.metrics})
