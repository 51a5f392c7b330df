"""Cross-entropy of the given tokens, l = -log_prob: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class CrossEntropyConfig(CheckedSettings):
    """No settings."""


@register_policy_loss(
    "cross_entropy",
    CrossEntropyConfig,
    correction="forbidden",
    aliases=("sft",),
    policy_gradient=False,
)
def cross_entropy(inputs: LossInputs, config: CrossEntropyConfig) -> PolicyLossOutput:
    """Token losses [T]."""
    return PolicyLossOutput(-inputs.masked(inputs.log_probs), {})
