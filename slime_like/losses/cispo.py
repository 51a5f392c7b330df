"""CISPO: clipped importance-sampling weights, MiniMax-M1, arXiv 2506.13585, equations 4 and 5; its
bounds: ScaleRL, arXiv 2510.13786.

    l = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log_prob,      r = policy / anchor

Every token keeps its gradient; only its weight is bounded. The anchor is the old policy or the
rollout engine; in the latter case the weight also corrects for the mismatch with the engine, and
the loss takes no other importance weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, CheckedSettings, arg
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_max, masked_mean, masked_min


@dataclass(frozen=True, slots=True)
class CISPOConfig(CheckedSettings):
    cispo_eps_clip_low: float = arg(
        1.0, "CISPO: the weight is bounded below by 1 - this.", legal=NON_NEGATIVE
    )
    cispo_eps_clip_high: float = arg(
        4.0, "CISPO: the weight is bounded above by 1 + this.", legal=NON_NEGATIVE
    )
    cispo_anchor: str = arg(
        "old",
        "CISPO: the ratio is to the old policy, or to the sampler.",
        choices=("old", "rollout"),
    )

    @property
    def anchor(self) -> str:
        return f"{self.cispo_anchor}_log_probs"


def _by_config(config: CISPOConfig) -> Mapping[str, object]:
    correction = "masks" if config.cispo_anchor == "rollout" else "outer"
    return {"needs": frozenset({"advantages", config.anchor}), "correction": correction}


@register_policy_loss(
    "cispo", CISPOConfig, needs=("advantages", "old_log_probs"), by_config=_by_config
)
def cispo(inputs: LossInputs, config: CISPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens whose ratio is outside the bounds."""
    ratio = inputs.log_ratio(config.anchor).detach().exp()
    weight = ratio.clamp(1 - config.cispo_eps_clip_low, 1 + config.cispo_eps_clip_high)
    mask = inputs.loss_mask
    metrics = ratio_metrics(inputs, ratio, config.anchor)
    metrics["pg_clipfrac"] = masked_mean(weight != ratio, mask)
    metrics["cispo/ratio_mean"] = masked_mean(ratio, mask)
    metrics["cispo/ratio_clamped_mean"] = masked_mean(weight, mask)
    metrics["cispo/ratio_max"] = masked_max(ratio, mask)
    metrics["cispo/ratio_min"] = masked_min(ratio, mask)
    return PolicyLossOutput(inputs.policy_gradient(weight * inputs.required("advantages")), metrics)
