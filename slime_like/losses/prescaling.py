"""Prescaled advantages, the convention of SkyRL and Tinker: the denominator of the reduction is
folded into the advantage, and token losses are summed.

    A' = u A,    w = 1:      sum_t loss(A'_t) = sum_t u_t loss(A_t)      if loss(c A) = c loss(A)

u is the token weight of the reduction (total.py). KL and entropy, which A does not multiply, keep
it as their weight: with w = 1 they would grow with the number of tokens. A loss that is not
homogeneous in A (clip_cov and kl_cov compare covariances with constants; dro and kimi have a term
without A) becomes another loss, and `total_loss` warns.

Training does not need this and has no flag for it: `train.py` carries u, which is right for every
loss. It is for callers whose advantages are scaled already, such as Tinker clients, and for
comparisons with frameworks that scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.lazy import Tensor, torch
from slime_like.losses.functional import token_weights
from slime_like.validation import require_finite, require_mask, require_shape


@dataclass(frozen=True, slots=True)
class PrescaledAdvantages:
    """Fields of `LossInputs`, all shaped as the mask, 0 or 1 where it is False."""

    advantages: Tensor  # u A
    policy_weights: Tensor  # w: 1
    loss_weights: Tensor  # u, of KL and entropy

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Keyword arguments for `compute_policy_loss`, except loss_weights."""
        return {"advantages": self.advantages, "policy_weights": self.policy_weights}


def prescale_advantages(
    reduction: str,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    seq_ids: Tensor | None = None,
    **of_samples: object,
) -> PrescaledAdvantages:
    """Divide the raw advantages of a whole optimizer step by the denominators of `reduction`.

    Args:
        reduction: One of `LOSS_REDUCTIONS`.
        advantages: [B, T], or [T] with seq_ids [T]; finite at active tokens.
        loss_mask: Shaped as advantages, bool or 0 and 1.
        of_samples: As of `token_weights`.

    Returns:
        Arguments for `compute_policy_loss`.

    Raises:
        ValueError: An unknown reduction, a missing input, a wrong shape, or non-finite advantages.
    """
    mask = require_mask("loss_mask", loss_mask)
    require_finite("advantages", require_shape("advantages", advantages, mask, "loss_mask"), mask)
    u = token_weights(reduction, mask, seq_ids=seq_ids, **of_samples).to(advantages.dtype)
    return PrescaledAdvantages(
        torch.where(mask, u * advantages, 0.0), torch.ones_like(advantages), u
    )
