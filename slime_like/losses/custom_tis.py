"""User-defined importance weights, with the interface of slime's `--custom-tis-function-path`.

slime calls such a function with the token losses, and it multiplies weights into them. The weights
depend only on the log-probs of trainer and rollout engine, so we call it once per optimizer step
with a loss of 1 for every token; the result is the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.lazy import Tensor, torch
from slime_like.losses.off_policy import Correction, off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.metrics.typed import Metric, masked_mean


@dataclass(frozen=True, slots=True)
class CustomTISArgs:
    """The first argument of the function, named as slime's flags are."""

    tis_clip: float
    tis_clip_low: float
    custom_tis_function_path: str
    use_tis: bool = True
    get_mismatch_metrics: bool = True


def custom_correction(
    function: Callable[..., Any],
    config: OffPolicyConfig,
    *,
    old_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
) -> Correction:
    """Call `function` for this rank's samples of one optimizer step.

    It is called with `args`, `pg_loss`, `train_log_probs`, `rollout_log_probs`, `loss_masks`,
    `total_lengths` and `response_lengths`, and returns (pg_loss [T], masks, metrics). Tokens with a
    mask or weight of 0 are rejected.

    Args:
        old_log_probs, rollout_log_probs, loss_masks: [R] per sample.
        total_lengths: Tokens of prompt and response per sample.

    Raises:
        ValueError: The result has another shape, or a weight of a kept token is negative or not
            finite.
    """
    path = config.custom_tis_function_path
    assert path is not None
    lengths = [int(mask.numel()) for mask in loss_masks]
    mask = torch.cat(list(loss_masks))
    base = off_policy_correction(
        OffPolicyConfig(custom_tis_function_path=path),
        old_log_probs=torch.cat(list(old_log_probs)),
        rollout_log_probs=torch.cat(list(rollout_log_probs)),
        loss_mask=mask,
        seq_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_seqs=len(lengths),
    )
    assert base.keep_mask is not None
    rollout = []
    valid = torch.split(base.keep_mask & mask, lengths)
    for is_valid, old, sampled in zip(valid, old_log_probs, rollout_log_probs):
        # no mismatch in dropped sequences and at inactive tokens, so that they get weight 1
        rollout.append(torch.where(is_valid, sampled.float(), old.float()))
    cap = config.token_tis_ratio_clip_high
    low = config.token_tis_ratio_clip_low
    with torch.no_grad():
        loss, masks, metrics = function(
            args=CustomTISArgs(cap, low, path),
            pg_loss=torch.ones(mask.numel()),
            train_log_probs=[old.float() for old in old_log_probs],
            rollout_log_probs=rollout,
            loss_masks=[part.float() for part in loss_masks],
            total_lengths=list(total_lengths),
            response_lengths=lengths,
        )
    weights = torch.as_tensor(loss)
    kept = torch.cat([torch.as_tensor(part).bool() for part in masks])
    keep = _keep_mask(path, weights, kept, base.keep_mask, mask)
    weights = torch.where(keep & mask, weights, 1.0).float()
    return Correction(keep, weights, {**base.metrics, **_typed(metrics, mask)})


def _keep_mask(path: str, weights: Tensor, kept: Tensor, valid: Tensor, mask: Tensor) -> Tensor:
    """[T] bool: tokens kept by the function, restricted to valid ones.

    Args:
        weights, kept: [T], from the function.
        valid: [T] bool, tokens of sequences with finite log-probs.
        mask: [T] bool, active tokens.
    """
    flag = f"--custom-tis-function-path {path}"
    if weights.shape != mask.shape or kept.shape != mask.shape:
        raise ValueError(
            f"{flag}: returned a loss of shape {tuple(weights.shape)} and masks of "
            f"{tuple(kept.shape)}; both must be [{mask.numel()}], like pg_loss"
        )
    keep = valid & ((kept & (weights != 0)) | ~mask)
    used = weights[keep & mask]
    if not (torch.isfinite(used) & (used > 0)).all():
        raise ValueError(f"{flag}: a weight is negative or not finite; reject such tokens")
    return keep


def _typed(metrics: Mapping[str, object], mask: Tensor) -> dict[str, Metric]:
    """Tensors over tokens are averaged over the active ones, numbers over the ranks."""
    typed = {}
    for name, value in metrics.items():
        tensor = torch.as_tensor(value).detach().float()
        if tensor.shape == mask.shape:
            typed[name] = masked_mean(tensor, mask)
        else:
            typed[name] = Metric("mean", tensor.mean(), torch.ones(()))
    return typed
