"""Policy losses, KL estimators and reductions. They need only torch: no process group, no Megatron.

>>> compute_policy_loss("ppo", log_probs, mask, weights, advantages=advantages, old_log_probs=old)
"""

from __future__ import annotations

from slime_like.losses import (  # noqa: F401  (each registers its loss)
    bradley_terry,
    cispo,
    clip_cov,
    cross_entropy,
    dpo,
    dppo,
    dro,
    gmpo,
    gpg,
    gspo,
    importance_sampling,
    ipo,
    kimi,
    kl_cov,
    kto,
    luspo,
    orpo,
    ppo,
    rollout_is,
    sapo,
    topr,
    up_grpo,
    vespo,
)
from slime_like.losses.functional import (
    ShapedCorrection,
    compute_off_policy_correction,
    compute_policy_loss,
    from_packed,
    from_padded,
    token_weights,
)
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.kl import KL_ESTIMATORS, kl_estimate
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.prescaling import PrescaledAdvantages, prescale_advantages
from slime_like.losses.reductions import LOSS_REDUCTIONS, reduction_weights
from slime_like.losses.registry import PolicyLoss, policy_losses
from slime_like.losses.total import LossOutput, LossTerms, total_loss
from slime_like.losses.value_loss import ValueInputs, ValueLossConfig, value_loss

__all__ = [
    "KL_ESTIMATORS",
    "LOSS_REDUCTIONS",
    "Correction",
    "LossInputs",
    "LossOutput",
    "LossTerms",
    "OffPolicyConfig",
    "PolicyLoss",
    "PolicyLossOutput",
    "PrescaledAdvantages",
    "ShapedCorrection",
    "ValueInputs",
    "ValueLossConfig",
    "compute_off_policy_correction",
    "compute_policy_loss",
    "from_packed",
    "from_padded",
    "kl_estimate",
    "off_policy_correction",
    "policy_losses",
    "prescale_advantages",
    "reduction_weights",
    "token_weights",
    "total_loss",
    "value_loss",
]
