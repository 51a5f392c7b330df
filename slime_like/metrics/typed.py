"""Metrics with a type, so that they reduce correctly over micro-batches and ranks.

A ratio metric carries numerator and denominator; extremes reduce by MIN and MAX. Accumulation stays
on the device; one reduction a step moves everything to the host at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from slime_like.lazy import Tensor, dist, torch

Kind = Literal["mean", "std", "sum", "min", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial value with its reduction."""

    kind: Kind
    # value, count, square: 0-d float tensors. A mean is value/count over all ranks and
    # micro-batches; std is the population standard deviation, from value, count and the float64 sum
    # of squares. count and square are None for other kinds
    value: Tensor
    count: Tensor | None = None
    square: Tensor | None = None

    def merge(self, other: Metric) -> Metric:
        assert self.kind == other.kind, (self.kind, other.kind)
        if self.kind == "min":
            return Metric("min", torch.minimum(self.value, other.value))
        if self.kind == "max":
            return Metric("max", torch.maximum(self.value, other.value))
        if self.kind == "sum":
            return Metric("sum", self.value + other.value)
        assert self.count is not None and other.count is not None
        if self.kind == "std":
            assert self.square is not None and other.square is not None
            return Metric(
                "std",
                self.value + other.value,
                self.count + other.count,
                self.square + other.square,
            )
        return Metric("mean", self.value + other.value, self.count + other.count)


def masked_mean(x: Tensor, mask: Tensor) -> Metric:
    """Mean of x over active tokens, or the share of active tokens where x is True. x [T], mask [T]
    bool; masked values have no effect, even if NaN."""
    if x.dtype == torch.bool:
        return Metric("mean", (x & mask).sum(dtype=torch.float32), _count(mask))
    x = torch.where(mask, x.detach().float(), zero(mask.device, torch.float32))
    return Metric("mean", x.sum(), _count(mask))


@cache
def zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A cached 0-d zero for torch.where, which would otherwise create a tensor per call."""
    with torch.inference_mode(False):
        return torch.zeros((), device=device, dtype=dtype)


_counted: tuple[weakref.ref[Tensor], int, Tensor] | None = None


def _count(mask: Tensor) -> Tensor:
    """Number of active tokens, 0-d float32; cached, since all metrics of a loss have the same mask
    (a dozen sums over T tokens per micro-batch otherwise).

    The reference is weak, so that the cache keeps no micro-batch alive; the version detects a mask
    that was changed in place. Inference tensors have no version.
    """
    global _counted
    if mask.is_inference():
        return mask.sum(dtype=torch.float32)
    if _counted is not None and _counted[0]() is mask and _counted[1] == mask._version:
        return _counted[2]
    count = mask.sum(dtype=torch.float32)
    _counted = (weakref.ref(mask), mask._version, count)
    return count


def masked_std(x: Tensor, mask: Tensor) -> Metric:
    """Standard deviation of x over active tokens, without Bessel's correction. Accumulates in
    float64, which values around 1 need."""
    x = torch.where(mask, x.detach().double(), 0.0)
    return Metric("std", x.sum(), mask.sum(dtype=torch.float64), x.square().sum())


def masked_min(x: Tensor, mask: Tensor) -> Metric:
    """Minimum of x over active tokens; infinity if there are none. x, mask: [T], T may be 0."""
    if x.numel() == 0:
        return Metric("min", x.new_full((), float("inf"), dtype=torch.float32))
    return Metric("min", torch.where(mask, x.detach().float(), float("inf")).amin())


def masked_max(x: Tensor, mask: Tensor) -> Metric:
    """Maximum of x over active tokens; minus infinity if there are none. x, mask: [T], T may be
    0."""
    if x.numel() == 0:
        return Metric("max", x.new_full((), float("-inf"), dtype=torch.float32))
    return Metric("max", torch.where(mask, x.detach().float(), float("-inf")).amax())


class MetricAccumulator:
    """Collects metrics over the micro-batches of one step and reduces them over a process group
    with at most three collectives."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            seen = self._metrics.get(name)
            self._metrics[name] = metric if seen is None else seen.merge(metric)

    def kind(self, name: str) -> Kind:
        """Kind of an accumulated metric."""
        return self._metrics[name].kind

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Values by name, equal on all ranks of `group` (None: this process only). Every rank of
        the group must have the same names. Means and extremes over nothing are omitted."""
        names = sorted(self._metrics)
        additive: list[Tensor] = []
        extremes: dict[str, list[Tensor]] = {"min": [], "max": []}
        for name in names:
            metric = self._metrics[name]
            if metric.kind in ("min", "max"):
                extremes[metric.kind].append(metric.value)
            else:
                additive += [
                    part for part in (metric.value, metric.count, metric.square) if part is not None
                ]
        parts = [
            self._reduce(additive, dist.ReduceOp.SUM, group),
            self._reduce(extremes["min"], dist.ReduceOp.MIN, group),
            self._reduce(extremes["max"], dist.ReduceOp.MAX, group),
        ]
        # the only host-device synchronisation
        values = torch.cat([part for part in parts if part is not None]).tolist() if names else []
        first = len(additive)
        last = len(additive) + len(extremes["min"])
        sums = iter(values[:first])
        lows = iter(values[first:last])
        highs = iter(values[last:])
        result: dict[str, float] = {}
        for name in names:
            kind = self._metrics[name].kind
            if kind == "min" or kind == "max":
                extreme = next(lows if kind == "min" else highs)
                if abs(extreme) != float("inf"):
                    result[name] = extreme
                continue
            total = next(sums)
            number = next(sums) if kind != "sum" else 1.0
            squares = next(sums) if kind == "std" else 0.0
            if kind == "std" and number > 0:
                result[name] = max(squares / number - (total / number) ** 2, 0.0) ** 0.5
            elif number > 0:
                result[name] = total / number
        return result

    @staticmethod
    def _reduce(
        values: list[Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> Tensor | None:
        """[n] float64 on the device; None if no rank has values."""
        if not values:
            return None
        stacked = torch.stack(values).double()  # stack accepts mixed fp32 and fp64
        if group is not None and group.size() > 1:
            dist.all_reduce(stacked, op=op, group=group)
        return stacked
