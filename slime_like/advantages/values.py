"""Metrics of how well a critic predicts the returns of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, dist, torch
from slime_like.metrics.typed import Metric, MetricAccumulator, masked_mean, masked_std
from slime_like.validation import require_samples

MIN_STD = 1e-6  # a smaller standard deviation is rounding


def value_metrics(
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    masks: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Metrics over the active tokens of all ranks of `group`, each with its own samples.
    A NaN return is no target.

    rollout/values_mean, _std and _abs; rollout/returns_mean and _std; rollout/values_nonfinite, a
    count; rollout/explained_variance, 1 - Var(return - value) / Var(return): 1 for perfect values,
    0 for a constant, below 0 for worse than a constant; omitted if all returns are equal.

    Args:
        values, returns: [R] per sample.
        masks: [R] bool.
    """
    require_samples(masks, values=values, returns=returns)
    value = torch.cat(list(values))
    target = torch.cat(list(returns))
    active = torch.cat(list(masks))
    finite = torch.isfinite(value)
    has_target = active & finite & ~target.isnan()
    accumulator = MetricAccumulator()
    accumulator.add(
        {
            "values_mean": masked_mean(value, active & finite),
            "values_std": masked_std(value, active & finite),
            "values_abs": masked_mean(value.abs(), active & finite),
            "returns_mean": masked_mean(target, has_target),
            "returns_std": masked_std(target, has_target),
            "errors_std": masked_std(target.double() - value.double(), has_target),
            "values_nonfinite": Metric("sum", (active & ~finite).sum().double()),
        }
    )
    metrics = accumulator.reduce(group)
    error = metrics.pop("errors_std", 0.0)
    spread = metrics.get("returns_std", 0.0)
    if spread > MIN_STD:
        metrics["explained_variance"] = 1 - (error / spread) ** 2
    return {f"rollout/{name}": number for name, number in metrics.items()}
