"""The losses in a notebook: padded [B, T] tensors, one sequence a row, or packed [T] with `seq_ids`. Torch alone is needed.

>>> u = token_weights("sequence_mean", loss_mask)
>>> correction = compute_off_policy_correction(OffPolicyConfig(tis_ratio_type="token"), old, rollout, loss_mask)
>>> compute_policy_loss("sapo", log_probs, loss_mask, u, advantages=advantages, old_log_probs=old, **correction.tensors).loss.backward()

Training calls what these call: `total_loss`, `reduction_weights`, `off_policy_correction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.config import ConfigError, check_fields
from slime_like.losses.inputs import from_packed, from_padded
from slime_like.losses.off_policy import OffPolicyConfig, off_policy_correction
from slime_like.losses.reductions import reduction_weights
from slime_like.losses.registry import policy_losses
from slime_like.losses.total import LossOutput, LossTerms, total_loss
from slime_like.metrics.typed import Metric


def compute_policy_loss(
    name: str,
    log_probs: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    *,
    seq_ids: Tensor | None = None,
    config: Any = None,
    terms: LossTerms | None = None,
    **tensors: Any,
) -> LossOutput:
    """The loss of padded [B, T] tensors, or of packed [T] ones with seq_ids [T] int64 in [0, S).

    loss_weights: as log_probs, see `token_weights`. tensors: advantages, old_log_probs, ref_log_probs, entropy, ... of `LossInputs`, as
    log_probs each; importance_level and selection_seed too. config: settings of the loss; None takes the defaults. Raises
    ValueError for an unknown loss, a missing tensor, a missing or illegal setting, or a wrong shape.
    """
    loss = policy_losses.get(name)
    defaults = loss.alias_defaults.get(name, {})
    if seq_ids is None:
        inputs = from_padded(log_probs, loss_mask, loss_weights, **tensors)
    else:
        inputs = from_packed(log_probs, loss_mask, loss_weights, seq_ids=seq_ids, **tensors)
    config = config if config is not None else loss.config_type(**defaults)
    if problems := check_fields(config):
        raise ConfigError(problems)
    return total_loss(inputs, loss, config, terms or LossTerms())


def token_weights(
    reduction: str, loss_mask: Tensor, *, seq_ids: Tensor | None = None, **of_samples: Any
) -> Tensor:
    """u of each token, float64, shaped as loss_mask: [B, T], or [T] with seq_ids [T]. The batch is the whole optimizer step.

    of_samples: rollout_ids, prompt_ids [B], loss_norm_length, micro_batch_size of `reduction_weights`; rollout_mean without rollout_ids takes
    every sequence for a rollout of its own. Raises ValueError as that does.
    """
    rows, count = _rows(loss_mask, seq_ids)
    active = torch.zeros(count, dtype=torch.int64, device=loss_mask.device).index_add(
        0, rows, loss_mask.bool().flatten().long()
    )
    if reduction == "rollout_mean":
        of_samples.setdefault("rollout_ids", torch.arange(count, device=loss_mask.device))
    return reduction_weights(reduction, active_tokens=active, **of_samples)[rows].view(
        loss_mask.shape
    )


@dataclass(frozen=True, slots=True)
class ShapedCorrection:
    """keep_mask, importance_weights: shaped as what was given, None as in `Correction`. importance_level: of LossInputs."""

    keep_mask: Tensor | None
    importance_weights: Tensor | None
    importance_level: str
    metrics: Mapping[str, Metric]

    @property
    def tensors(self) -> dict[str, Any]:
        """What `compute_policy_loss` takes of it."""
        return {
            "keep_mask": self.keep_mask,
            "importance_weights": self.importance_weights,
            "importance_level": self.importance_level,
        }


def compute_off_policy_correction(
    config: OffPolicyConfig,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    seq_ids: Tensor | None = None,
) -> ShapedCorrection:
    """`off_policy_correction` of padded [B, T] tensors, or of packed [T] ones with seq_ids [T]."""
    rows, count = _rows(loss_mask, seq_ids)
    correction = off_policy_correction(
        config,
        old_log_probs=old_log_probs.flatten(),
        rollout_log_probs=rollout_log_probs.flatten(),
        loss_mask=loss_mask.bool().flatten(),
        seq_ids=rows,
        num_seqs=count,
    )
    keep, weights = (
        None if x is None else x.view(loss_mask.shape)
        for x in (correction.keep_mask, correction.importance_weights)
    )
    return ShapedCorrection(keep, weights, config.tis_ratio_type or "token", correction.metrics)


def _rows(loss_mask: Tensor, seq_ids: Tensor | None) -> tuple[Tensor, int]:
    """(the sequence of each token, flat; their number)."""
    if seq_ids is not None:
        if seq_ids.shape != loss_mask.shape or loss_mask.dim() != 1:
            raise ValueError(
                f"seq_ids has shape {tuple(seq_ids.shape)}, loss_mask {tuple(loss_mask.shape)}; both must be [T]"
            )
        return seq_ids, int(seq_ids.max()) + 1
    if loss_mask.dim() != 2:
        raise ValueError(
            f"loss_mask has shape {tuple(loss_mask.shape)}; it must be [B, T], or [T] with seq_ids"
        )
    batch, length = loss_mask.shape
    return torch.arange(batch, device=loss_mask.device).repeat_interleave(length), batch
