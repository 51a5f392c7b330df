"""Policy losses, KL, reductions. Torch alone is needed: no process group, no Megatron.

>>> compute_policy_loss("sapo", log_probs, loss_mask, loss_weights, advantages=advantages, old_log_probs=old)  # [B, T] each
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slime_like.losses import (  # noqa: F401  (each registers its loss)
    cispo,
    clip_cov,
    cross_entropy,
    dppo,
    dro,
    gmpo,
    gpg,
    gspo,
    importance_sampling,
    kimi,
    kl_cov,
    ppo,
    rollout_is,
    sapo,
    topr,
    vespo,
)
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, from_padded
from slime_like.losses.kl import KL_ESTIMATORS, kl_estimate
from slime_like.losses.off_policy import Correction, OffPolicyConfig, off_policy_correction
from slime_like.losses.reductions import LOSS_REDUCTIONS, reduction_weights
from slime_like.losses.registry import PolicyLoss, policy_losses
from slime_like.losses.total import LossOutput, LossTerms, total_loss

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
    "compute_policy_loss",
    "from_padded",
    "kl_estimate",
    "off_policy_correction",
    "policy_losses",
    "reduction_weights",
    "total_loss",
]


def compute_policy_loss(
    name: str,
    log_probs: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    *,
    config: Any = None,
    terms: LossTerms | None = None,
    **tensors: Any,
) -> LossOutput:
    """The loss of padded [B, T] tensors, one sequence a row.

    loss_weights: [B, T], see `reduction_weights`. tensors: advantages, old_log_probs, ref_log_probs, entropy, ... of `LossInputs`, [B, T]
    each; importance_level and selection_seed too. config: settings of the loss; None takes the defaults. Raises
    ValueError for an unknown loss, a missing tensor or setting, or a wrong shape.
    """
    loss = policy_losses.get(name)
    defaults = loss.alias_defaults.get(name, {})
    inputs = from_padded(log_probs, loss_mask, loss_weights, **tensors)
    return total_loss(inputs, loss, config if config is not None else loss.config_type(**defaults), terms or LossTerms())
