"""Functional API of the losses, e.g. for notebooks: padded [B, T] tensors with one sequence per
row, or packed [T] tensors with `seq_ids`. Needs only torch.

>>> u = token_weights("sequence_mean", mask)
>>> config = OffPolicyConfig(tis_ratio_type="token")
>>> tensors = compute_off_policy_correction(config, old_log_probs, rollout_log_probs, mask).tensors
>>> tensors |= dict(advantages=advantages, old_log_probs=old_log_probs)
>>> compute_policy_loss("sapo", log_probs, mask, u, **tensors).loss.backward()

Training calls the same functions: `total_loss`, `reduction_weights`, `off_policy_correction`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs
from slime_like.losses.off_policy import off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.reductions import reduction_weights
from slime_like.losses.registry import PolicyLoss, policy_losses
from slime_like.losses.total import LossOutput, LossTerms, total_loss
from slime_like.metrics.typed import Metric
from slime_like.validation import (
    require_finite,
    require_ids,
    require_mask,
    require_shape,
    require_tensor,
)

# keyword arguments of `compute_policy_loss` and of `token_weights`
_TENSORS = tuple(
    field.name
    for field in fields(LossInputs)
    if field.name
    not in ("log_probs", "loss_mask", "loss_weights", "seq_ids", "num_seqs", "cp_group")
)
_OF_SAMPLES = ("rollout_ids", "prompt_ids", "loss_norm_length", "micro_batch_size")
# may be non-finite at rejected tokens
_OF_KEPT_TOKENS = ("old_log_probs", "rollout_log_probs", "importance_weights")


def compute_policy_loss(
    name: str,
    log_probs: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    *,
    seq_ids: Tensor | None = None,
    config: object = None,
    terms: LossTerms | None = None,
    **tensors: Any,
) -> LossOutput:
    """Compute a policy loss from padded tensors, or from packed ones with seq_ids.

    Args:
        name: Name or alias of a registered loss.
        log_probs: [B, T], or [T] with seq_ids; current policy, with grad. May be empty: the loss is
            then 0.
        loss_mask: Shaped as log_probs, bool or 0 and 1.
        loss_weights: Shaped as log_probs, float: the weight of each token in the sum that the loss
            is, with the full denominator of the reduction; see `token_weights`. Nothing divides
            afterwards.
        seq_ids: [T] integers in [0, S).
        config: Settings of the loss; None: the defaults of `name`. Must agree with an alias.
        terms: Weights of KL, entropy and other terms; None: policy loss only.
        tensors: advantages, old_log_probs, ref_log_probs, entropy, ... of `LossInputs`, shaped as
            log_probs; also importance_level and selection_seed.

    Returns:
        The loss, 0-d with grad, and its metrics.

    Raises:
        ValueError: An unknown loss or keyword, a missing tensor, a missing or illegal setting, a
            wrong shape, a non-finite number at an active token, or weights of a reduction for which
            the loss is not defined.
    """
    loss = policy_losses.get(name)
    _require_known("compute_policy_loss", tensors, _TENSORS)
    if seq_ids is None:
        inputs = from_padded(log_probs, loss_mask, loss_weights, **tensors)
    else:
        inputs = from_packed(log_probs, loss_mask, loss_weights, seq_ids=seq_ids, **tensors)
    settings = loss.settings(name, config)
    _require_reduction(loss.with_config(settings), inputs)
    return total_loss(inputs, loss, settings, terms or LossTerms())


def token_weights(
    reduction: str, loss_mask: Tensor, *, seq_ids: Tensor | None = None, **of_samples: Any
) -> Tensor:
    """The weight u of each token under a reduction. The batch must be the whole optimizer step.

    Args:
        reduction: One of `LOSS_REDUCTIONS`.
        loss_mask: [B, T], or [T] with seq_ids [T]; bool or 0 and 1.
        of_samples: rollout_ids, prompt_ids [B], loss_norm_length, micro_batch_size of
            `reduction_weights`; without rollout_ids, rollout_mean treats every sequence as its own
            rollout.

    Returns:
        Float64, shaped as loss_mask.

    Raises:
        ValueError: A wrong mask or shape, an unknown keyword, and as `reduction_weights`.
    """
    _require_known("token_weights", of_samples, _OF_SAMPLES)
    mask, rows, count = _rows(loss_mask, seq_ids)
    active = torch.zeros(count, dtype=torch.int64, device=mask.device)
    active = active.index_add(0, rows, mask.flatten().long())
    if reduction == "rollout_mean":
        of_samples.setdefault("rollout_ids", torch.arange(count, device=mask.device))
    return reduction_weights(reduction, active_tokens=active, **of_samples)[rows].view(mask.shape)


@dataclass(frozen=True, slots=True)
class ShapedCorrection:
    """Off-policy correction in the caller's shape."""

    keep_mask: Tensor | None  # None as in `Correction`
    importance_weights: Tensor | None  # None as in `Correction`
    importance_level: str  # as in `LossInputs`
    metrics: Mapping[str, Metric]

    @property
    def tensors(self) -> dict[str, object]:
        """Keyword arguments for `compute_policy_loss`."""
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
    """`off_policy_correction` for padded tensors, or for packed ones with seq_ids.

    Args:
        config: The correction.
        old_log_probs: [B, T], or [T] with seq_ids; the trainer's, before the update.
        rollout_log_probs: The rollout engine's, shaped as old_log_probs. A sequence with a
            non-finite value is dropped and counted.
        loss_mask: Shaped as old_log_probs, bool or 0 and 1.
        seq_ids: [T] integers in [0, S).

    Returns:
        Keep mask and weights, shaped as loss_mask, and metrics.

    Raises:
        ValueError: An illegal setting, a missing tensor, a wrong shape, a mask with values other
            than 0 and 1, or a non-finite trainer log-prob at an active token.
    """
    mask, rows, count = _rows(loss_mask, seq_ids)
    old = require_shape("old_log_probs", old_log_probs, mask, "loss_mask")
    require_finite("old_log_probs", old, mask)
    rollout = require_shape("rollout_log_probs", rollout_log_probs, mask, "loss_mask")
    correction = off_policy_correction(
        config,
        old_log_probs=old.flatten(),
        rollout_log_probs=rollout.flatten(),
        loss_mask=mask.flatten(),
        seq_ids=rows,
        num_seqs=count,
    )
    keep = correction.keep_mask
    weights = correction.importance_weights
    return ShapedCorrection(
        None if keep is None else keep.view(mask.shape),
        None if weights is None else weights.view(mask.shape),
        config.tis_ratio_type or "token",
        correction.metrics,
    )


def _rows(loss_mask: Tensor, seq_ids: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """(flat bool mask, flat sequence ids, number of sequences)."""
    mask = require_mask("loss_mask", loss_mask)
    if seq_ids is not None:
        if mask.dim() != 1:
            raise ValueError(
                f"loss_mask has shape {tuple(mask.shape)}; with seq_ids it must be [T]"
            )
        return mask, seq_ids, count_sequences(seq_ids, mask.numel())
    if mask.dim() != 2:
        raise ValueError(
            f"loss_mask has shape {tuple(mask.shape)}; it must be [B, T], or [T] with seq_ids"
        )
    batch, length = mask.shape
    return mask, torch.arange(batch, device=mask.device).repeat_interleave(length), batch


def from_padded(
    log_probs: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    *,
    importance_level: str = "token",
    selection_seed: int = 0,
    **tensors: Tensor | None,
) -> LossInputs:
    """Build LossInputs from padded tensors with one sequence per row.

    Args:
        log_probs: [B, T], current policy, with grad; B and T may be 0.
        loss_mask: [B, T] bool, or 0 and 1.
        loss_weights: [B, T], u.
        importance_level: "token" or "sequence".
        selection_seed: Seed of losses that select tokens at random.
        tensors: Other fields of `LossInputs`, [B, T] each, or None.

    Returns:
        The packed inputs, T' = B * T tokens.

    Raises:
        ValueError: A wrong shape, a mask with values other than 0 and 1, or a non-finite number at
            an active token (for `old_log_probs`, `rollout_log_probs` and `importance_weights`: at a
            token that `keep_mask` keeps).
    """
    if require_tensor("log_probs", log_probs).dim() != 2:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)}; it must be [B, T], or [T] with seq_ids"
        )
    batch, length = log_probs.shape
    seq_ids = torch.arange(batch, device=log_probs.device).repeat_interleave(length)
    tensors = {"loss_mask": loss_mask, "loss_weights": loss_weights, **tensors}
    return _checked(log_probs, tensors, seq_ids, batch, importance_level, selection_seed)


def from_packed(
    log_probs: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    *,
    seq_ids: Tensor,
    importance_level: str = "token",
    selection_seed: int = 0,
    **tensors: Tensor | None,
) -> LossInputs:
    """Build LossInputs from packed tensors.

    Args:
        seq_ids: [T] integers in [0, S), the sequence of each token.
        log_probs, loss_mask, loss_weights, tensors: as of `from_padded`, [T] each; T may be 0.
        importance_level, selection_seed: as of `from_padded`.

    Returns:
        The inputs.

    Raises:
        ValueError: as `from_padded`, and for sequence ids below 0.
    """
    if require_tensor("log_probs", log_probs).dim() != 1:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)}; with seq_ids it must be [T]"
        )
    num_seqs = count_sequences(seq_ids, log_probs.numel())
    tensors = {"loss_mask": loss_mask, "loss_weights": loss_weights, **tensors}
    return _checked(log_probs, tensors, seq_ids, num_seqs, importance_level, selection_seed)


def count_sequences(seq_ids: object, tokens: int) -> int:
    """S of seq_ids [tokens], the largest id plus 1. Raises ValueError for another shape, floats and
    negative ids."""
    ids = require_ids("seq_ids", seq_ids, tokens, index=True)
    if tokens == 0:
        return 0
    if (lowest := int(ids.min())) < 0:
        raise ValueError(f"seq_ids holds {lowest}; ids must be >= 0")
    return int(ids.max()) + 1


def _checked(
    log_probs: Tensor,
    tensors: Mapping[str, object],
    seq_ids: Tensor,
    num_seqs: int,
    importance_level: str,
    selection_seed: int,
) -> LossInputs:
    flat: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is None and name not in ("loss_mask", "loss_weights"):
            flat[name] = None
            continue
        shaped = require_shape(name, tensor, log_probs, "log_probs").flatten()
        flat[name] = require_mask(name, shaped) if name.endswith("mask") else shaped
    mask = flat["loss_mask"]
    keep = flat.get("keep_mask")
    kept = mask if keep is None else mask & keep
    for name, tensor in {"log_probs": log_probs.detach().flatten(), **flat}.items():
        if tensor is not None and tensor.is_floating_point():
            require_finite(name, tensor, kept if name in _OF_KEPT_TOKENS else mask)
    return LossInputs(
        log_probs=log_probs.flatten(),
        seq_ids=seq_ids,
        num_seqs=num_seqs,
        importance_level=importance_level,
        selection_seed=selection_seed,
        **flat,
    )


def _require_known(function: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise ValueError for a keyword argument that the function does not have."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"legal: {', '.join(known)}"
            raise ValueError(f"{function} has no argument {name!r}; {hint}")


def _require_reduction(loss: PolicyLoss, inputs: LossInputs) -> None:
    """Raise ValueError for one weight on all tokens of sequences of different lengths, as
    token_mean gives it, if the loss is only defined for means over sequences."""
    if not loss.required_reductions:
        return
    lengths = inputs.seq_sum(inputs.loss_mask.double())[inputs.loss_mask]
    weights = inputs.loss_weights[inputs.loss_mask]
    if weights.numel() and bool((weights == weights[0]).all() & (lengths != lengths[0]).any()):
        legal = " or ".join(loss.required_reductions)
        raise ValueError(
            f"policy loss {loss.name} needs loss_weights of {legal} (token_weights), and every "
            f"token has the weight {float(weights[0]):g}, although the sequences have different "
            "lengths"
        )
