"""GSPO: group sequence policy optimisation, in its token form (GSPO-token), arXiv 2507.18071,
equations 13 and 14.

With D the mean log-ratio of the sequence over its original mask:

    s = exp(min(log_prob - sg(log_prob) + sg(D), 10))
    l = max(-A s, -A clip(s, 1 - eps_clip, 1 + eps_clip_high))

Value and clip are the sequence's; the gradient by a token's log-prob is -A s. If A is constant in a
sequence and the reduction is a mean over sequences, this is the gradient of GSPO (equation 5). A
geometric mean stays close to 1, so the clip range is narrow.

With --gspo-ratio-level turn, D is the mean over one turn (consecutive active tokens): the turn
ratio of Turn-PPO, arXiv 2511.20718, in the form of GSPO-token. For a sequence with one turn the
result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, arg
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.ppo import ClipConfig, clipped_surrogate
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class GSPOConfig(ClipConfig):
    eps_clip: float = arg(3e-4, "The ratio is bounded below by 1 - this.", legal=NON_NEGATIVE)
    gspo_ratio_level: str = arg(
        "sequence",
        "GSPO: ratio of the full sequence, or of each turn of an agent.",
        choices=("sequence", "turn"),
    )


@register_policy_loss(
    "gspo",
    GSPOConfig,
    needs=("advantages", "old_log_probs"),
    recommended_reductions=("sequence_mean", "rollout_mean"),
    sequence_ratio=True,
)
def gspo(inputs: LossInputs, config: GSPOConfig) -> PolicyLossOutput:
    """Token losses [T]; the ratio of the metrics is s."""
    return sequence_surrogate(inputs, config, config.gspo_ratio_level)


def sequence_surrogate(
    inputs: LossInputs, config: ClipConfig, level: str = "sequence"
) -> PolicyLossOutput:
    """PPO's surrogate with the sequence ratio, or the turn ratio (level "turn"); token losses
    [T]."""
    ratio = inputs.sequence_log_ratio(level).exp()
    surrogate = clipped_surrogate(inputs, ratio, config)
    metrics = {**ratio_metrics(inputs, ratio), **surrogate.metrics}
    return PolicyLossOutput(surrogate.token_losses, metrics)
