"""Cross-entropy of the given tokens, l = -log_prob: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.registry import PolicyLoss, policy_losses


@dataclass(frozen=True, slots=True)
class CrossEntropyConfig(CheckedSettings):
    """No settings."""


def cross_entropy(inputs: LossInputs, config: CrossEntropyConfig) -> PolicyLossOutput:
    """Token losses [T]."""
    return PolicyLossOutput(-inputs.masked(inputs.log_probs), {})


policy_losses.add(
    "cross_entropy",
    PolicyLoss(
        name="cross_entropy",
        config_type=CrossEntropyConfig,
        fn=cross_entropy,
        needs=frozenset(),
        correction="forbidden",
    ),
    aliases=("sft",),
)
