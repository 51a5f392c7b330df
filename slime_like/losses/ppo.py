"""PPO's clipped surrogate, with clip-higher and dual clip.

PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7. Clip-higher: DAPO, arXiv 2503.14476,
equation 8. Dual clip: Ye et al. 2019, arXiv 1912.09729, equation 8.

    l = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)),      where A < 0 and eps_clip_c is given: l = min(l, -eps_clip_c A)
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.losses.clipping import ClipConfig, clipped_surrogate
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import PolicyLoss, policy_losses


@dataclass(frozen=True, slots=True)
class PPOConfig(ClipConfig):
    pass


def ppo(inputs: LossInputs, config: PPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens whose clipped branch is strictly above
    the unclipped one."""
    ratio = inputs.log_ratio().exp()
    surrogate = clipped_surrogate(inputs, ratio, config)
    return PolicyLossOutput(
        surrogate.token_losses, {**ratio_metrics(inputs, ratio), **surrogate.metrics}
    )


policy_losses.add(
    "ppo",
    PolicyLoss(
        name="ppo",
        config_type=PPOConfig,
        fn=ppo,
        needs=frozenset({"advantages", "old_log_probs"}),
        alias_defaults={"dual_clip": {"eps_clip_c": 3.0}},
    ),
    aliases=("regular", "vanilla", "dual_clip"),
)
