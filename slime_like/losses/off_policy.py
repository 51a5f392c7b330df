"""Off-policy correction: the policy that the trainer computes (log-probs o, before the update) is not quite the one that sampled (m).

With x = exp(clamp(o - m, +-20)) of an active token, and products and means over the active tokens of a sequence that are left:

    0  a sequence with an o - m that is not finite is dropped
    1  outliers: drop the sequence when any x is outside [low, high]
    2  token mask: keep the token when low <= x <= high
    3  truncated importance sampling: token c = clamp(x, low, C); sequence c = min(prod x, C)
    4  sequence mask: keep the sequence when low <= (prod x)^(1/n) <= high (geometric) or low <= prod x <= high (product)
    5  M2PO (arXiv 2510.01161): drop the tokens with the largest (o - m)^2 until the mean of the rest is at most a threshold

Token-level truncation: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; why the sequence level: "When Speed
Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", section 4.2. Nothing here depends on the current policy or on
the loss, so it is computed once for the samples of an optimizer step, before they are cut into micro-batches, and has no gradient. Every test
reads "keep if in bounds", so that NaN is dropped. The denominators of the loss stay those of the original mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.config import (
    NON_NEGATIVE,
    POSITIVE,
    CheckedSettings,
    Problem,
    SettingsError,
    arg,
    flag_name,
)
from slime_like.losses.checks import require_ids, require_shape
from slime_like.losses.inputs import LOG_RATIO_CLAMP
from slime_like.metrics.typed import Metric, masked_max, masked_mean, masked_min, masked_std

_BOUNDS = (
    "token_tis_ratio_clip",
    "geo_mask",
    "product_mask",
    "outlier_token_is_threshold",
    "token_mask_is_threshold",
)


@dataclass(frozen=True, slots=True)
class OffPolicyConfig(CheckedSettings):
    tis_ratio_type: str | None = arg(
        None,
        "Truncated importance sampling: weight the policy loss of each token, or of each sequence, by trainer over sampler.",
        choices=("token", "sequence"),
    )
    token_tis_ratio_clip_high: float = arg(
        2.0, "Cap of the weight with --tis-ratio-type token.", legal=POSITIVE
    )
    token_tis_ratio_clip_low: float = arg(
        0.0, "Least weight with --tis-ratio-type token.", legal=NON_NEGATIVE
    )
    sequence_tis_ratio_clip_high: float = arg(
        5.0, "Cap of the weight with --tis-ratio-type sequence.", legal=POSITIVE
    )
    sequence_mask_metric: str | None = arg(
        None,
        "Drop whole sequences by their ratio of trainer to sampler: geometric mean over tokens, or product.",
        choices=("geometric", "product"),
    )
    geo_mask_low: float = arg(
        0.99,
        "Least geometric mean that is kept; lower it for mixtures of experts.",
        legal=NON_NEGATIVE,
    )
    geo_mask_high: float = arg(
        1.01,
        "Largest geometric mean that is kept; raise it for mixtures of experts.",
        legal=POSITIVE,
    )
    product_mask_low: float = arg(0.5, "Least product that is kept.", legal=NON_NEGATIVE)
    product_mask_high: float = arg(2.0, "Largest product that is kept.", legal=POSITIVE)
    outlier_token_is_threshold_low: float | None = arg(
        None,
        "Drop a sequence with a token whose ratio is below this; try 1e-4.",
        legal=NON_NEGATIVE,
    )
    outlier_token_is_threshold_high: float | None = arg(
        None, "Drop a sequence with a token whose ratio is above this; try 100.", legal=POSITIVE
    )
    token_mask_is_threshold_low: float | None = arg(
        None, "Drop tokens whose ratio is below this; try 0.5.", legal=NON_NEGATIVE
    )
    token_mask_is_threshold_high: float | None = arg(
        None, "Drop tokens whose ratio is above this; try 2.", legal=POSITIVE
    )
    m2po_threshold: float | None = arg(
        None,
        "M2PO: drop the tokens furthest off until the mean squared log-ratio of the rest is below this; try 0.04.",
        legal=POSITIVE,
    )
    custom_tis_function_path: str | None = arg(
        None,
        "With --use-tis: module.function or file.py:function in place of truncated importance sampling, called with slime's keyword "
        "arguments once per optimizer step; a path ending in icepop_function means our own IcePop.",
    )

    @property
    def outliers(self) -> bool:
        return (
            self.outlier_token_is_threshold_low is not None
            or self.outlier_token_is_threshold_high is not None
        )

    @property
    def token_mask(self) -> bool:
        return (
            self.token_mask_is_threshold_low is not None
            or self.token_mask_is_threshold_high is not None
        )

    @property
    def weights(self) -> bool:
        """Whether tokens get importance weights."""
        return self.tis_ratio_type is not None or self.custom_tis_function_path is not None

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected: then the sampler must return log-probs."""
        return (
            self.weights
            or self.outliers
            or self.token_mask
            or self.sequence_mask_metric is not None
            or self.m2po_threshold is not None
        )

    def conflicts(self) -> list[Problem]:
        """Bounds in the wrong order, and one of a pair that goes together."""
        found = []
        for name in _BOUNDS:
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and high is not None and low > high:
                message = f"must not be above {flag_name(name + '_high')} {high:g}"
                found.append(Problem(flag_name(f"{name}_low"), low, message))
        low, high = self.token_mask_is_threshold_low, self.token_mask_is_threshold_high
        if (low is None) != (high is None):
            given, missing = ("low", "high") if high is None else ("high", "low")
            message = f"needs {flag_name('token_mask_is_threshold_' + missing)} too; the token mask has two sides"
            flag = flag_name(f"token_mask_is_threshold_{given}")
            found.append(Problem(flag, low if high is None else high, message))
        return found


@dataclass(frozen=True, slots=True)
class Correction:
    """keep_mask: [T] bool, True at inactive tokens too; None when no correction is on. importance_weights: [T], 1 at tokens that are
    inactive or rejected; None without importance sampling. metrics: typed, over the original mask, equal names on all ranks."""

    keep_mask: Tensor | None
    importance_weights: Tensor | None
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One step's active tokens, made safe: differences are 0 at inactive tokens and where they are not finite."""

    differences: Tensor  # [T] float, o - m
    mask: Tensor  # [T] bool, active
    finite: Tensor  # [T] bool
    seq_ids: Tensor  # [T]
    num_seqs: int

    @property
    def ratios(self) -> Tensor:
        return clamped_exp(self.differences)

    @property
    def has_tokens(self) -> Tensor:
        """[S] bool: sequences with active tokens."""
        return self.any(self.mask)

    def any(self, flags: Tensor) -> Tensor:
        """[T] bool -> [S] bool."""
        return self.sum(flags.double(), flags) > 0

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sums over the tokens of `mask` in each sequence: [T] -> [S] float64."""
        zeros = torch.zeros(self.num_seqs, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.seq_ids, torch.where(mask, values.double(), 0.0))


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, +-20))."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


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
    """Keep mask and importance weights of one optimizer step's tokens on this rank, and how far trainer and sampler are apart.

    Args:
        config: which correction. `custom_tis_function_path` is not read here: see `custom_tis.py`.
        old_log_probs: [T], by the trainer, before the update; at the sampler's temperature.
        rollout_log_probs: [T], by the sampler.
        loss_mask: [T] bool.
        seq_ids: [T] integers in [0, num_seqs). Sequences must be whole.
        num_seqs: S.
        group: the data-parallel ranks that share the step, all of which call this; None: this process alone.

    Returns:
        Keep mask, weights and metrics of this rank's tokens.

    Raises:
        ValueError: for bounds in the wrong order, a missing tensor or a wrong shape.
    """
    if problems := config.conflicts():
        raise SettingsError(problems, type(config).__name__)
    require_shape("old_log_probs", old_log_probs, loss_mask, "loss_mask")
    require_shape("rollout_log_probs", rollout_log_probs, loss_mask, "loss_mask")
    require_ids("seq_ids", seq_ids, loss_mask.numel(), below=num_seqs)
    with torch.no_grad():
        difference = _wide(old_log_probs) - _wide(rollout_log_probs)
        finite = torch.isfinite(difference) | ~loss_mask
        tokens = _Tokens(
            torch.where(loss_mask & finite, difference, 0.0), loss_mask, finite, seq_ids, num_seqs
        )
        metrics = mismatch_metrics(tokens)
        if not config.enabled:
            return Correction(None, None, metrics)
        keep = ~tokens.any(~finite)[seq_ids]
        keep = _outliers(config, tokens, keep, metrics)
        keep = _token_mask(config, tokens, keep, metrics)
        weights = _importance_weights(config, tokens, keep, metrics)
        keep = _sequence_mask(config, tokens, keep, metrics)
        if config.m2po_threshold is not None:
            keep = _m2po(config.m2po_threshold, tokens, keep, metrics, group)
        if weights is not None:
            weights = torch.where(keep & loss_mask, weights, 1.0).to(difference.dtype)
        return Correction(keep, weights, metrics)


def _wide(log_probs: Tensor) -> Tensor:
    """fp32 before anything is subtracted; fp64 stays."""
    return log_probs if log_probs.dtype == torch.float64 else log_probs.float()


def mismatch_metrics(tokens: _Tokens) -> dict[str, Metric]:
    """How far the two policies are apart, over the active tokens whose log-probs are finite."""
    mask = tokens.mask & tokens.finite
    x, distance = tokens.ratios, tokens.differences.abs()
    broken = tokens.any(~tokens.finite)
    metrics = {"rollout_logprobs_nonfinite": Metric("sum", broken.sum().float())}
    for name, values in (("is_ratio", x), ("rollout_train_logprobs_abs_diff", distance)):
        metrics[f"{name}_mean"] = masked_mean(values, mask)
        metrics[f"{name}_std"] = masked_std(values, mask)
        metrics[f"{name}_max"] = masked_max(values, mask)
        metrics[f"{name}_min"] = masked_min(values, mask)
    # slime's names for the same
    metrics["tis"] = masked_mean(x, mask)
    metrics["tis_abs"] = masked_mean((x - 1).abs(), mask)
    metrics["train_rollout_logprob_abs_diff"] = masked_mean(distance, mask)
    return metrics


def _outliers(
    config: OffPolicyConfig, tokens: _Tokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if not config.outliers:
        return keep
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    x = tokens.ratios
    active = tokens.mask & tokens.finite
    over = (
        tokens.any(active & ~(x <= high))
        if high is not None
        else torch.zeros_like(tokens.has_tokens)
    )
    under = (
        tokens.any(active & ~(x >= low)) if low is not None else torch.zeros_like(tokens.has_tokens)
    )
    _report_sequences("outlier_seq", tokens, over, under, metrics)
    return keep & ~(over | under)[tokens.seq_ids]


def _token_mask(
    config: OffPolicyConfig, tokens: _Tokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if not config.token_mask:
        return keep
    low, high = config.token_mask_is_threshold_low, config.token_mask_is_threshold_high
    assert low is not None and high is not None, "see OffPolicyConfig.conflicts"
    x = tokens.ratios
    inside = ((x >= low) & (x <= high) & tokens.finite) | ~tokens.mask
    metrics["token_mask_ratio"] = masked_mean(~inside, tokens.mask)
    return keep & inside


def _importance_weights(
    config: OffPolicyConfig, tokens: _Tokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor | None:
    """[T], from the tokens that `keep` leaves."""
    if config.tis_ratio_type is None:
        return None
    if config.tis_ratio_type == "token":
        x, cap = tokens.ratios, config.token_tis_ratio_clip_high
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
    config: OffPolicyConfig, tokens: _Tokens, keep: Tensor, metrics: dict[str, Metric]
) -> Tensor:
    if config.sequence_mask_metric is None:
        return keep
    geometric = config.sequence_mask_metric == "geometric"
    left = tokens.mask & keep
    total = tokens.sum(tokens.differences, left)
    if geometric:
        total = total / tokens.sum(torch.ones_like(tokens.differences), left).clamp(min=1)
    low, high = (
        (config.geo_mask_low, config.geo_mask_high)
        if geometric
        else (config.product_mask_low, config.product_mask_high)
    )
    ratio, judged = (
        clamped_exp(total),
        tokens.any(left),
    )  # a sequence of which nothing is left is gone already
    over, under = judged & ~(ratio <= high), judged & ~(ratio >= low)
    _report_sequences(
        "geo_sequence_mask" if geometric else "product_sequence_mask", tokens, over, under, metrics
    )
    return keep & ~(over | under)[tokens.seq_ids]


def _report_sequences(
    name: str, tokens: _Tokens, over: Tensor, under: Tensor, metrics: dict[str, Metric]
) -> None:
    """over, under: [S] bool. Shares of the sequences with active tokens."""
    for words, flags in (("masked", over | under), ("over_high", over), ("under_low", under)):
        metrics[f"{name}_{words}_ratio"] = masked_mean(flags, tokens.has_tokens)


def _m2po(
    threshold: float,
    tokens: _Tokens,
    keep: Tensor,
    metrics: dict[str, Metric],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The largest set of tokens, taken in ascending (o - m)^2 over all ranks of the step, whose mean stays within the threshold; the
    closest at least. Tokens that are equally far off share their fate, so that neither their order nor the ranks matter."""
    left = tokens.mask & keep
    squares = tokens.differences.double().square()
    values, counts = _gather(squares[left], group).unique(return_counts=True)  # ascending
    means = (values * counts).cumsum(0) / counts.cumsum(0)  # ascending too
    fitting = torch.where(means <= threshold, values, 0.0)
    kept = (
        squares <= torch.cat([values[:1], fitting]).amax()
        if values.numel()
        else torch.ones_like(left)
    )
    metrics["m2po_mask_ratio"] = masked_mean(left & ~kept, tokens.mask)
    return keep & (kept | ~tokens.mask)


def _gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[n] of every rank, one after the other."""
    if group is None or group.size() == 1:
        return values
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([values.numel()], device=values.device), group=group)
    longest = max(int(c) for c in counts)
    padded = torch.zeros(longest, dtype=values.dtype, device=values.device)
    padded[: values.numel()] = values
    parts = [torch.zeros_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts)])
