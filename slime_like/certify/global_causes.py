"""Finds which setting of a whole model explains the log-probs of an engine that shows no layers:
the reference is changed in one respect in all of its layers, and the change with which it gives the
reported log-probs is the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_like.certify.causes import (
    ACTIVATIONS,
    BASES,
    EPSILONS,
    FACTORS,
    KNOWN_NUMBERS,
    KNOWN_SWITCHES,
    Cause,
    Change,
    SearchTime,
    changed,
    fitted,
)
from slime_like.certify.layered import LayeredModel

Modules = Sequence[torch.nn.Module]
Frequencies = Sequence[tuple[Tensor, Tensor]]  # buffers of rope, and what they are now


class ModelCauses:
    """Looks for the cause of a difference of log-probs.

    Args:
        model: The reference, in float64.
        gap: The differences of the log-probs [N] of the model as it is now.
        short: Those of one sequence, by which candidates are fitted and rejected.
        limit: What rounding explains.
        search_time: For this search and others; the pass in progress is finished.
    """

    def __init__(
        self,
        model: LayeredModel,
        gap: Callable[[], Tensor],
        short: Callable[[], Tensor],
        limit: float,
        search_time: SearchTime | None = None,
    ) -> None:
        self._model = model.model
        self._gap = gap
        self._short = short
        self._limit = limit
        self._time = search_time or SearchTime(math.inf)

    @torch.no_grad()
    def find(self) -> Cause | None:
        """The cause, or None if no candidate is one. Raises TimeoutError at the end of the time:
        some hundred passes may be needed, each as long as the model is large."""
        whole = float(self._timely(self._gap).mean())
        one = float(self._timely(self._short).mean())
        for change in self._candidates():
            with changed(change):
                if self._explains(self._short, one) and self._explains(self._gap, whole):
                    return Cause(change.cause, f"{change.text}, in all layers")
        return None

    def _explains(self, measure: Callable[[], Tensor], unexplained: float) -> bool:
        gap = self._timely(measure)
        return float(gap.max()) <= 3 * self._limit and float(gap.mean()) <= unexplained / 2

    def _error(self, change: Change) -> float:
        with changed(change):
            return float(self._timely(self._short).mean())

    def _timely(self, measure: Callable[[], Tensor]) -> Tensor:
        self._time.check()
        return measure()

    def _fit(self, make: Callable[[float], Change], grid: Sequence[float]) -> Change:
        return fitted(make, grid, self._error)

    def _candidates(self) -> Iterator[Change]:
        for name in ("variance_epsilon", "eps"):
            if norms := self._with(name, float):
                yield self._fit(partial(number_change, "norm epsilon", norms, name), EPSILONS)
        yield from self._norms()
        yield from self._ropes()
        for name in ("scaling", "softmax_scale"):
            yield from self._multiples("softmax scale", name)
        modules = [m for m in self._model.modules() if hasattr(m, "act_fn")]
        for title, function in ACTIVATIONS.items():
            changes = tuple((module, "act_fn", function) for module in modules)
            yield Change("activation function", f"the activation is {title}", attributes=changes)
        yield from self._switches()
        for name in self._names(float):
            if name not in KNOWN_NUMBERS:
                yield from self._multiples("setting", name)

    def _norms(self) -> Iterator[Change]:
        weights = [
            m.weight.data
            for path, m in self._model.named_modules()
            if path.endswith("norm") and isinstance(getattr(m, "weight", None), Tensor)
        ]
        for offset, text in ((1.0, "1 more"), (-1.0, "1 less")):
            yield Change(
                "norm around zero or one",
                f"the weights of norms count as {text} than the reference's",
                tensors=tuple((weight, weight + offset) for weight in weights),
            )

    def _ropes(self) -> Iterator[Change]:
        own = [
            (buffer, buffer.clone())
            for name, buffer in self._model.named_buffers()
            if name.endswith("inv_freq") and "original" not in name
        ]
        if own:
            yield self._fit(partial(base_change, own), BASES)
            yield self._fit(partial(factor_change, own), FACTORS)

    def _multiples(self, cause: str, name: str) -> Iterator[Change]:
        modules = self._with(name, float)
        values = {getattr(module, name) for module in modules}
        if len(values) == 1 and 0 < (old := values.pop()) < math.inf:
            grid = [old * factor for factor in FACTORS]
            yield self._fit(partial(number_change, cause, modules, name), grid)

    def _switches(self) -> Iterator[Change]:
        for name in self._names(bool):
            if name in KNOWN_SWITCHES or name.startswith(("_", "is_", "gradient", "use_cache")):
                continue
            modules = self._with(name, bool)
            changes = tuple((module, name, not getattr(module, name)) for module in modules)
            yield Change("setting", f"{name} is the opposite", attributes=changes)
        if modules := self._with("norm_topk_prob", bool):
            value = not modules[0].norm_topk_prob
            changes = tuple((m, "norm_topk_prob", value) for m in modules)
            text = f"norm_topk_prob is {value}"
            yield Change("router normalisation", text, attributes=changes)

    def _with(self, name: str, kind: type) -> list[Any]:
        return [m for m in self._layers() if type(vars(m).get(name)) is kind]

    def _names(self, kind: type) -> list[str]:
        names = [k for m in self._layers() for k, value in vars(m).items() if type(value) is kind]
        return list(dict.fromkeys(names))

    def _layers(self) -> Iterator[torch.nn.Module]:
        """All modules but the model itself, whose switches are of its class."""
        for path, module in self._model.named_modules():
            if path.count(".") > 0:
                yield module


def number_change(cause: str, modules: Modules, name: str, value: float) -> Change:
    old = getattr(modules[0], name)
    attributes = tuple((module, name, value) for module in modules)
    return Change(cause, f"{name} is {value:.4g}, the reference's {old:.4g}", attributes=attributes)


def base_change(own: Frequencies, base: float) -> Change:
    tensors = tuple(
        (buffer, base ** (-torch.arange(now.numel()).to(now) / now.numel())) for buffer, now in own
    )
    return Change("rope base", f"the rope base is {base:.6g}", tensors=tensors)


def factor_change(own: Frequencies, factor: float) -> Change:
    tensors = tuple((buffer, factor * now) for buffer, now in own)
    text = f"all rope angles are {factor:.6g} times the reference's"
    return Change("rope scaling", text, tensors=tensors)
