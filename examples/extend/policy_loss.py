"""SPO: a policy loss whose penalty grows with the distance of the ratio from 1, instead of a clip.
Xie et al., arXiv 2401.16025, equation 10: l = -A r + |A| (r - 1)^2 / (2 eps)."""

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class SPOConfig(CheckedSettings):
    spo_eps: float = arg(
        0.2, "SPO: distance of the ratio from 1 where the gradient vanishes.", legal=POSITIVE
    )


@register_policy_loss(
    "spo", SPOConfig, needs=("advantages", "old_log_probs"), help="arXiv 2401.16025."
)
def spo(inputs: LossInputs, config: SPOConfig) -> PolicyLossOutput:
    """Token losses [T]; the trainer applies mask and weights and adds KL and entropy."""
    advantages, ratio = inputs.required("advantages"), inputs.log_ratio().exp()
    penalty = advantages.abs() * (ratio - 1) ** 2 / (2 * config.spo_eps)
    return PolicyLossOutput(penalty - advantages * ratio, ratio_metrics(inputs, ratio))
