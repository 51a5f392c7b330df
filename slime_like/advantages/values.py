"""Metrics of how well a critic predicts the returns of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.inputs import require_samples
from slime_like.metrics.typed import Metric, MetricAccumulator, masked_mean, masked_std

SAME = 1e-6  # a standard deviation that is rounding


def value_metrics(
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    masks: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Over the active tokens of all ranks of `group`, each with its own samples. values, returns:
    [R] by sample; masks: [R] bool. A return that is NaN is no target.

    rollout/values_mean, _std and _abs; rollout/returns_mean and _std; rollout/values_nonfinite, a
    count; rollout/explained_variance, 1 - Var(return - value) / Var(return): 1 for perfect values,
    0 for a constant, below 0 for worse than a constant. It is left out where all returns are the
    same.
    """
    require_samples(masks, values=values, returns=returns)
    value, target, active = (
        torch.cat([*parts, parts[0][:0]]) for parts in (list(values), list(returns), list(masks))
    )
    finite = torch.isfinite(value)
    known = active & finite & ~target.isnan()
    accumulator = MetricAccumulator()
    accumulator.add(
        {
            "values_mean": masked_mean(value, active & finite),
            "values_std": masked_std(value, active & finite),
            "values_abs": masked_mean(value.abs(), active & finite),
            "returns_mean": masked_mean(target, known),
            "returns_std": masked_std(target, known),
            "errors_std": masked_std(target.double() - value.double(), known),
            "values_nonfinite": Metric("sum", (active & ~finite).sum().double()),
        }
    )
    metrics = accumulator.reduce(group)
    error, spread = metrics.pop("errors_std", 0.0), metrics.get("returns_std", 0.0)
    if spread > SAME:
        metrics["explained_variance"] = 1 - (error / spread) ** 2
    return {f"rollout/{name}": number for name, number in metrics.items()}
