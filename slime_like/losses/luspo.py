"""LUSPO: length-unbiased sequence policy optimisation, arXiv 2602.05261: GSPO with each sequence's
loss times its length.

With L the active tokens of the sequence and s its ratio as in `gspo.py`:

    l = L max(-A s, -A clip(s, 1 - eps_clip, 1 + eps_clip_high))

Under a mean over sequences a token of GSPO has weight 1 / L, so that a long response moves the
policy less per token than a short one; here all tokens have equal weights. L counts the original
mask, as the reduction does. Gradients are L times those of GSPO, so a --clip-grad tuned for
GSPO acts on every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, arg
from slime_like.lazy import torch
from slime_like.losses.gspo import sequence_surrogate
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.ppo import ClipConfig
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class LUSPOConfig(ClipConfig):
    eps_clip: float = arg(2e-3, "The ratio is bounded below by 1 - this.", legal=NON_NEGATIVE)


@register_policy_loss(
    "luspo",
    LUSPOConfig,
    needs=("advantages", "old_log_probs"),
    required_reductions=("sequence_mean", "rollout_mean"),
    sequence_ratio=True,
)
def luspo(inputs: LossInputs, config: LUSPOConfig) -> PolicyLossOutput:
    """Token losses [T]; the ratio of the metrics is s."""
    output = sequence_surrogate(inputs, config)
    length = inputs.seq_sum(torch.ones_like(output.token_losses.detach()))
    return PolicyLossOutput(length * output.token_losses, output.metrics)
