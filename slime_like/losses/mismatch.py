"""Mismatch between trainer and rollout engine: metrics over an optimizer step, and over a rollout
for the guards.

With d = o - m of an active token (o: trainer before the update, m: engine) and x = exp(d); means
are over tokens unless stated otherwise:

    rollout_kl      mean(-d)               k1 estimate of KL(engine || trainer), Schulman 2020
    rollout_k3_kl   mean(x - 1 - d)        k3 estimate of the same
    chi2_token      mean(x^2) - 1          chi-squared divergence, the variance of the weights
    chi2_seq        mean over sequences of (prod x)^2, minus 1
    is_ess          mean(x)^2 / mean(x^2)  effective sample size as a share of the tokens, Kong 1992
    training_ppl    mean over sequences of exp(-mean o); rollout_ppl of m; *_log_ppl without the exp
    log_ppl_diff    mean over sequences of mean(-d): positive if the trainer's perplexity is higher

The quantities are differences near 0, so sums use float64, and x^2 - 1 is computed as expm1(2 d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.inputs import LOG_RATIO_CLAMP, upcast
from slime_like.metrics.typed import (
    Metric,
    MetricAccumulator,
    masked_max,
    masked_mean,
    masked_min,
    masked_std,
)

# prefixes of metrics that become an effective sample size once reduced over the optimizer step
ESS_PARTS = {"is_ess": "is_ratio", "tis_ess": "tis_weight"}


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one optimizer step. Differences are set to 0 at inactive tokens and where they are
    not finite."""

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

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Means, as `sum`; 0 in a sequence without any."""
        return self.sum(values, mask) / self.sum(torch.ones_like(values), mask).clamp(min=1)

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Largest value >= 0 over the tokens of `mask` in each sequence: [T] -> [S] float64; 0
        without any."""
        zeros = torch.zeros(self.num_seqs, dtype=torch.float64, device=values.device)
        return zeros.scatter_reduce(
            0, self.seq_ids, torch.where(mask, values.double(), 0.0), "amax"
        )


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, +-20))."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def precise_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean over `mask`, summed in float64, for values near 0 that are differences of numbers near
    1."""
    kept = torch.where(mask, values.detach().double(), 0.0)
    return Metric("mean", kept.sum(), mask.sum(dtype=torch.float64))


def mismatch_metrics(tokens: StepTokens, old: Tensor, rollout: Tensor) -> dict[str, Metric]:
    """Mismatch metrics over the active tokens with finite log-probs.

    Args:
        tokens: Of one optimizer step on this rank.
        old, rollout: [T] log-probs of trainer and engine, read at those tokens only.

    Returns:
        Typed metrics; equal names on all ranks.
    """
    mask = tokens.mask & tokens.finite
    x = tokens.ratios
    distance = tokens.differences.abs()
    nonfinite = tokens.any(~tokens.finite)
    metrics = {"rollout_logprobs_nonfinite": Metric("sum", nonfinite.sum().float())}
    for name, values in (("is_ratio", x), ("rollout_train_logprobs_abs_diff", distance)):
        metrics[f"{name}_mean"] = masked_mean(values, mask)
        metrics[f"{name}_std"] = masked_std(values, mask)
        metrics[f"{name}_max"] = masked_max(values, mask)
        metrics[f"{name}_min"] = masked_min(values, mask)
    # the same under slime's names
    metrics["tis"] = masked_mean(x, mask)
    metrics["tis_abs"] = masked_mean((x - 1).abs(), mask)
    metrics["train_rollout_logprob_abs_diff"] = masked_mean(distance, mask)
    return metrics | _divergences(tokens, mask) | _perplexities(tokens, mask, old, rollout)


def step_mismatch(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    seq_ids: Tensor,
    num_seqs: int,
) -> tuple[StepTokens, dict[str, Metric]]:
    """One optimizer step's tokens on this rank, and `mismatch_metrics` of them.

    Args:
        old_log_probs: [T], the trainer's, before the update, at the sampling temperature.
        rollout_log_probs: [T], the rollout engine's.
        loss_mask: [T] bool.
        seq_ids: [T] integers in [0, num_seqs). Sequences must be complete.
        num_seqs: S.
    """
    with torch.no_grad():
        difference = upcast(old_log_probs) - upcast(rollout_log_probs)
        finite = torch.isfinite(difference) | ~loss_mask
        tokens = StepTokens(
            torch.where(loss_mask & finite, difference, 0.0), loss_mask, finite, seq_ids, num_seqs
        )
        return tokens, mismatch_metrics(tokens, old_log_probs, rollout_log_probs)


def _divergences(tokens: StepTokens, mask: Tensor) -> dict[str, Metric]:
    d = tokens.differences.double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    seq_d = tokens.sum(tokens.differences, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "rollout_kl": precise_mean(-tokens.differences, mask),
        "rollout_k3_kl": precise_mean(k3_of_ratio(tokens.differences), mask),
        "chi2_token": precise_mean(torch.expm1(2 * d), mask),
        "chi2_seq": precise_mean(torch.expm1(2 * seq_d), tokens.any(mask)),
        **ess_parts("is_ratio", torch.expm1(d), torch.expm1(2 * d), mask),
    }


def k3_of_ratio(differences: Tensor) -> Tensor:
    """x - 1 - d, >= 0, float64: the k3 estimate of KL(engine || trainer)."""
    d = differences.double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.expm1(d) - d


def _perplexities(
    tokens: StepTokens, mask: Tensor, old: Tensor, rollout: Tensor
) -> dict[str, Metric]:
    active = tokens.any(mask)
    log_ppl = {"training": -tokens.mean(old, mask), "rollout": -tokens.mean(rollout, mask)}
    gap = -tokens.mean(tokens.differences, mask)
    metrics = {
        "log_ppl_diff": precise_mean(gap, active),
        "log_ppl_abs_diff": precise_mean(gap.abs(), active),
        "ppl_ratio": precise_mean(clamped_exp(gap), active),
    }
    for name, values in log_ppl.items():
        metrics[f"{name}_log_ppl"] = precise_mean(values, active)
        metrics[f"{name}_ppl"] = precise_mean(values.clamp(max=LOG_RATIO_CLAMP).exp(), active)
    return metrics


def ess_parts(
    name: str, weights_less_1: Tensor, squares_less_1: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Inputs of `with_ess`: means of w - 1 and w^2 - 1 over `mask`."""
    return {
        f"{name}_less_1": precise_mean(weights_less_1, mask),
        f"{name}_square_less_1": precise_mean(squares_less_1, mask),
    }


def with_ess(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the parts of an effective sample size by mean(w)^2 / mean(w^2). `metrics` must be
    reduced over the optimizer step already."""
    result = dict(metrics)
    for name, parts in ESS_PARTS.items():
        mean = result.pop(f"{parts}_less_1", None)
        square = result.pop(f"{parts}_square_less_1", None)
        if mean is not None and square is not None:
            result[name] = (1 + mean) ** 2 / (1 + square) if square > -1 else 1.0
    return result


def gather_values(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate [n] of all ranks; n may differ."""
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


def train_rollout_difference(
    old: Sequence[Tensor],
    rollout: Sequence[Tensor],
    masks: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Log-prob difference between trainer and rollout engine over the active tokens of all
    data-parallel ranks. The probability-ratio error is mean(exp |o - m|), 1 if they agree. p99 is
    the maximum of the ranks' 99th percentiles.

    Args:
        old, rollout: [R] per sample.
        masks: [R] bool.
        group: Data-parallel process group, or None.
    """
    difference = torch.cat([(o - m).abs() for o, m in zip(old, rollout)])
    mask = torch.cat(list(masks))
    active = difference[mask]
    p99 = torch.zeros(1)
    if active.numel():
        p99 = active.kthvalue(math.ceil(0.99 * active.numel())).values.reshape(1)
    nonfinite = (~torch.isfinite(difference)).float()
    accumulator = MetricAccumulator()
    accumulator.add(
        {
            "rollout/train_rollout_log_prob_diff_mean": masked_mean(difference, mask),
            "rollout/train_rollout_log_prob_diff_max": masked_max(difference, mask),
            "rollout/train_rollout_log_prob_diff_p99": masked_max(p99, torch.ones_like(p99).bool()),
            "rollout/token_ratio_error": masked_mean(difference.exp(), mask),
            "rollout/log_probs_nonfinite": masked_mean(nonfinite, mask),
        }
    )
    return accumulator.reduce(group)


# Bounds of the parts by which the difference is reported: tokens before a token, and tokens of the
# response before it.
CONTEXT_BOUNDS = (1024, 4096, 16384, 65536)
RESPONSE_BOUNDS = (256, 1024, 4096, 16384)


def difference_by_place(
    old: Sequence[Tensor],
    rollout: Sequence[Tensor],
    masks: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Mean absolute log-prob difference between trainer and rollout engine, by the depth of a
    token's context and by its position in the response, over the active tokens of all data-parallel
    ranks. Parts without tokens are omitted, and so are the parts of a kind that has only one.

    Args:
        old, rollout: [R] per sample.
        masks: [R] bool.
        prompt_lengths: In tokens.
        group: Data-parallel process group, or None.
    """
    difference = torch.cat([(o - m).abs() for o, m in zip(old, rollout)])
    mask = torch.cat(list(masks))
    response = torch.cat([torch.arange(o.numel(), device=o.device) for o in old])
    starts = [torch.full_like(o, n, dtype=torch.int64) for o, n in zip(old, prompt_lengths)]
    accumulator = MetricAccumulator()
    for kind, place, bounds in (
        ("context", response + torch.cat(starts), CONTEXT_BOUNDS),
        ("response", response, RESPONSE_BOUNDS),
    ):
        part = torch.bucketize(place, torch.tensor(bounds, device=place.device), right=True)
        for i, name in enumerate(place_names(kind, bounds)):
            accumulator.add({name: masked_mean(difference, mask & (part == i))})
    means = accumulator.reduce(group)
    several: dict[str, float] = {}
    for kind, bounds in (("context", CONTEXT_BOUNDS), ("response", RESPONSE_BOUNDS)):
        found = {n: means[n] for n in place_names(kind, bounds) if n in means}
        several |= found if len(found) > 1 else {}
    return several


def place_names(kind: str, bounds: Sequence[int]) -> list[str]:
    """Metrics of the parts, from the first to the last."""
    name = f"rollout/log_prob_diff_{kind}"
    return [*(f"{name}_below_{bound}" for bound in bounds), f"{name}_from_{bounds[-1]}"]
