"""User-defined importance weights, with the interface of slime's `--custom-tis-function-path`.

slime calls such a function with the token losses, and it multiplies weights into them. The weights
depend only on the log-probs of trainer and rollout engine, so we call it once per optimizer step
with a loss of 1 for every token; the result is the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    assert config.custom_tis_function_path is not None
    path = config.custom_tis_function_path
    lengths = [int(mask.numel()) for mask in loss_masks]
    mask = torch.cat(list(loss_masks))
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    base = off_policy_correction(
        OffPolicyConfig(custom_tis_function_path=path),
        old_log_probs=torch.cat(list(old_log_probs)),
        rollout_log_probs=torch.cat(list(rollout_log_probs)),
        loss_mask=mask,
        seq_ids=seq_ids,
        num_seqs=len(lengths),
    )
    assert base.keep_mask is not None
    sound = torch.split(base.keep_mask & mask, lengths)
    with torch.no_grad():
        weights, masks, metrics = function(
            args=CustomTISArgs(
                config.token_tis_ratio_clip_high, config.token_tis_ratio_clip_low, path
            ),
            pg_loss=torch.ones(mask.numel()),
            train_log_probs=[o.float() for o in old_log_probs],
            # no mismatch at dropped sequences and inactive tokens, so that they get weight 1
            rollout_log_probs=[
                torch.where(good, m.float(), o.float())
                for good, o, m in zip(sound, old_log_probs, rollout_log_probs)
            ],
            loss_masks=[part.float() for part in loss_masks],
            total_lengths=list(total_lengths),
            response_lengths=lengths,
        )
    weights = torch.as_tensor(weights)
    kept = torch.cat([torch.as_tensor(part).bool() for part in masks])
    keep = _checked(path, weights, kept, base.keep_mask, mask)
    return Correction(
        keep,
        torch.where(keep & mask, weights, 1.0).float(),
        {**base.metrics, **_typed(metrics, mask)},
    )


def _checked(path: str, weights: Tensor, kept: Tensor, sound: Tensor, mask: Tensor) -> Tensor:
    """[T] bool: tokens kept by the function, restricted to valid ones.

    Args:
        weights, kept: [T], what the function returned.
        sound: [T] bool, tokens of sequences with finite log-probs.
        mask: [T] bool, active tokens.

    Raises:
        ValueError: For another shape, and a weight that is negative or not finite.
    """
    if weights.shape != mask.shape or kept.shape != mask.shape:
        raise ValueError(
            f"--custom-tis-function-path {path}: returned a loss of shape {tuple(weights.shape)} and masks of {tuple(kept.shape)}; "
            f"both must be [{mask.numel()}], as the loss that it was given"
        )
    keep = sound & ((kept & (weights != 0)) | ~mask)
    used = weights[keep & mask]
    if not (torch.isfinite(used) & (used > 0)).all():
        raise ValueError(
            f"--custom-tis-function-path {path}: made a weight that is negative or not finite; reject such tokens in the mask"
        )
    return keep


def _typed(metrics: dict[str, object], mask: Tensor) -> dict[str, Metric]:
    """Tensors over tokens are averaged over the active ones, numbers over the ranks."""
    typed = {}
    for name, value in metrics.items():
        value = torch.as_tensor(value).detach().float()
        typed[name] = (
            masked_mean(value, mask)
            if value.shape == mask.shape
            else Metric("mean", value.mean(), torch.ones(()))
        )
    return typed
