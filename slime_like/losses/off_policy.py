"""Off-policy correction for the mismatch between the trainer's policy (log-probs o, before the
update) and the policy that sampled (m).

With x = exp(clamp(o - m, +-20)) of an active token, and products and means over the remaining
active tokens of a sequence:

    0  sequences with a non-finite o - m are dropped
    1  outliers: drop the sequence when any x is outside [low, high]
    2  token mask: keep the token when low <= x <= high
    3  truncated importance sampling: token c = clamp(x, low, C); sequence c = min(prod x, C)
    4  sequence mask: keep the sequence when low <= (prod x)^(1/n) <= high (geometric) or
       low <= prod x <= high (product)
    5  rejection: with d = o - m, drop tokens with a large k2 = d^2 / 2 or k3 = x - 1 - d, or
       sequences by its sum, mean or maximum
    6  M2PO (arXiv 2510.01161): drop the tokens with the largest (o - m)^2 until the mean of the
       rest is at most a threshold
    7  batch normalisation: divide weights by their mean over the remaining tokens of the optimizer
       step

Token-level truncation: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training";
why the sequence level: "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch", section 4.2. Nothing depends on the current policy or the loss, so it
is computed once per optimizer step, before micro-batches are made, and has no gradient. Every test
is "keep if within bounds", so that NaN is dropped. The loss keeps the denominators of the original
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_like.config import SettingsError, check_relations
from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.mismatch import (
    StepTokens,
    clamped_exp,
    ess_parts,
    gather_values,
    k3_of_ratio,
    step_mismatch,
)
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.validation import require_ids, require_shape


@dataclass(frozen=True, slots=True)
class Correction:
    """Result of the correction."""

    keep_mask: Tensor | None  # [T] bool, True at inactive tokens; None if no correction is on
    # [T], 1 at inactive or rejected tokens; None without importance sampling
    importance_weights: Tensor | None
    metrics: Mapping[str, Metric]  # typed, over the original mask, with equal names on all ranks


def off_policy_correction(
    config: OffPolicyConfig,
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    seq_ids: Tensor,
    num_seqs: int,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Compute keep mask, importance weights and mismatch metrics of one optimizer step on this
    rank.

    Args:
        config: The correction. `custom_tis_function_path` is handled in `custom_tis.py`.
        old_log_probs: [T], the trainer's, before the update, at the sampling temperature.
        rollout_log_probs: [T], the rollout engine's.
        loss_mask: [T] bool.
        seq_ids: [T] integers in [0, num_seqs). Sequences must be complete.
        num_seqs: S.
        group: Data-parallel ranks that share the step; collective over them. None: one process.

    Returns:
        Keep mask, weights and metrics of this rank's tokens.

    Raises:
        ValueError: Bounds in the wrong order, a missing tensor or a wrong shape.
    """
    if problems := check_relations(config):
        raise SettingsError(problems, type(config).__name__)
    require_shape("old_log_probs", old_log_probs, loss_mask, "loss_mask")
    require_shape("rollout_log_probs", rollout_log_probs, loss_mask, "loss_mask")
    require_ids("seq_ids", seq_ids, loss_mask.numel(), below=num_seqs, index=True)
    with torch.no_grad():
        tokens, metrics = step_mismatch(
            old_log_probs=old_log_probs,
            rollout_log_probs=rollout_log_probs,
            loss_mask=loss_mask,
            seq_ids=seq_ids,
            num_seqs=num_seqs,
        )
        if not config.enabled:
            return Correction(None, None, metrics)
        keep = ~tokens.any(~tokens.finite)[seq_ids]
        keep = _outliers(config, tokens, keep, metrics)
        keep = _token_mask(config, tokens, keep, metrics)
        weights = _importance_weights(config, tokens, keep, metrics)
        keep = _sequence_mask(config, tokens, keep, metrics)
        keep = _rejection(config, tokens, keep, metrics)
        if config.m2po_threshold is not None:
            keep = _m2po(config.m2po_threshold, tokens, keep, metrics, group)
        if weights is not None:
            weights = _normalized(config, tokens, keep, weights, metrics, group)
            weights = torch.where(keep & loss_mask, weights, 1.0).to(tokens.differences.dtype)
        return Correction(keep, weights, metrics)


def _outliers(
    config: OffPolicyConfig, tokens: StepTokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if not config.outliers:
        return keep
    low = config.outlier_token_is_threshold_low
    high = config.outlier_token_is_threshold_high
    x = tokens.ratios
    active = tokens.mask & tokens.finite
    none = torch.zeros_like(tokens.has_tokens)
    over = none if high is None else tokens.any(active & ~(x <= high))
    under = none if low is None else tokens.any(active & ~(x >= low))
    _report_sequences("outlier_seq", tokens, over, under, metrics)
    return keep & ~(over | under)[tokens.seq_ids]


def _token_mask(
    config: OffPolicyConfig, tokens: StepTokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if not config.token_mask:
        return keep
    low = config.token_mask_is_threshold_low
    high = config.token_mask_is_threshold_high
    assert low is not None and high is not None, "checked by check_relations"
    x = tokens.ratios
    inside = ((x >= low) & (x <= high) & tokens.finite) | ~tokens.mask
    metrics["token_mask_ratio"] = masked_mean(~inside, tokens.mask)
    return keep & inside


def _importance_weights(
    config: OffPolicyConfig, tokens: StepTokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor | None:
    """Importance weights [T] from the tokens in `keep`."""
    if config.tis_ratio_type is None:
        return None
    if config.tis_ratio_type == "token":
        x = tokens.ratios
        cap = config.token_tis_ratio_clip_high
        weights = x.clamp(config.token_tis_ratio_clip_low, cap)
        mask = tokens.mask & tokens.finite
        metrics["tis_token_clip_high_ratio"] = masked_mean(x > cap, mask)
        metrics["tis_clipfrac"] = masked_mean(weights != x, mask)
        return weights
    cap = config.sequence_tis_ratio_clip_high
    product = clamped_exp(tokens.sum(tokens.differences, tokens.mask & keep))
    metrics["tis_seq_clip_high_ratio"] = masked_mean(product > cap, tokens.has_tokens)
    return product.clamp(max=cap)[tokens.seq_ids]


def _sequence_mask(
    config: OffPolicyConfig, tokens: StepTokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if config.sequence_mask_metric is None:
        return keep
    remaining = tokens.mask & keep
    total = tokens.sum(tokens.differences, remaining)
    name = "product_sequence_mask"
    low = config.product_mask_low
    high = config.product_mask_high
    if config.sequence_mask_metric == "geometric":
        total = total / tokens.sum(torch.ones_like(tokens.differences), remaining).clamp(min=1)
        name = "geo_sequence_mask"
        low = config.geo_mask_low
        high = config.geo_mask_high
    ratio = clamped_exp(total)
    has_remaining = tokens.any(remaining)
    over = has_remaining & ~(ratio <= high)
    under = has_remaining & ~(ratio >= low)
    _report_sequences(name, tokens, over, under, metrics)
    return keep & ~(over | under)[tokens.seq_ids]


def _rejection(
    config: OffPolicyConfig, tokens: StepTokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    """Rejection by k2 or k3 of the remaining tokens."""
    if config.rejection_metric is None:
        return keep
    assert config.rejection_threshold is not None, "checked by check_relations"
    level, _, kind = config.rejection_metric.rpartition("_")
    d = tokens.differences.double()
    estimate = d * d / 2 if kind == "k2" else k3_of_ratio(d)
    remaining = tokens.mask & keep
    if level != "token":
        reduce = {"seq_mean": tokens.mean, "seq_sum": tokens.sum, "seq_max": tokens.max}[level]
        estimate = reduce(estimate, remaining)[tokens.seq_ids]
    within = (estimate <= config.rejection_threshold) | ~tokens.mask
    rejected = remaining & ~within
    metrics["rejection_masked_ratio"] = masked_mean(rejected, tokens.mask)
    metrics["rejection_seq_masked_ratio"] = masked_mean(tokens.any(rejected), tokens.has_tokens)
    return keep & within


def _normalized(
    config: OffPolicyConfig,
    tokens: StepTokens,
    keep: Tensor,
    weights: Tensor,
    metrics: dict[str, Metric],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The weights [T], divided by their mean over the optimizer step if configured; adds their
    effective sample size to the metrics."""
    remaining = tokens.mask & keep
    values = weights.double()
    metrics |= ess_parts("tis_weight", values - 1, values.square() - 1, remaining)
    if not config.tis_batch_normalize:
        return weights
    if config.tis_ratio_type == "sequence":  # all tokens of a sequence have the same weight
        values = tokens.mean(values, remaining)
        remaining = tokens.any(remaining)
    sums = torch.stack([torch.where(remaining, values, 0.0).sum(), remaining.sum().double()])
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[1].clamp(min=1)
    mean = torch.where(mean > 0, mean, 1.0)  # no remaining tokens, or all weights are 0
    metrics["tis_batch_norm_factor"] = Metric("mean", mean, torch.ones_like(mean))
    return weights.double() / mean


def _report_sequences(
    name: str, tokens: StepTokens, over: Tensor, under: Tensor, metrics: dict[str, Metric]
) -> None:
    """Report fractions of sequences above and below the bounds. over, under: [S] bool."""
    for suffix, flags in (("masked", over | under), ("over_high", over), ("under_low", under)):
        metrics[f"{name}_{suffix}_ratio"] = masked_mean(flags, tokens.has_tokens)


def _m2po(
    threshold: float,
    tokens: StepTokens,
    keep: Tensor,
    metrics: dict[str, Metric],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Keep tokens in ascending order of (o - m)^2 over all ranks of the step, as long as the mean
    stays within the threshold; at least the smallest. Ties are kept or dropped together, so that
    the result does not depend on order or layout."""
    remaining = tokens.mask & keep
    squares = tokens.differences.double().square()
    values, counts = gather_values(squares[remaining], group).unique(return_counts=True)
    means = (values * counts).cumsum(0) / counts.cumsum(0)  # ascending, as the values are
    within = torch.where(means <= threshold, values, 0.0)
    kept = torch.ones_like(remaining)
    if values.numel():
        kept = squares <= torch.cat([values[:1], within]).amax()
    metrics["m2po_mask_ratio"] = masked_mean(remaining & ~kept, tokens.mask)
    return keep & (kept | ~tokens.mask)
