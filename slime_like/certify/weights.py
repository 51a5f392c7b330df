"""Says how a weight differs from the reference's: it is another's, transposed, scaled, of an
earlier version, rounded, with an adapter, and so on. Every answer is checked with the numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slime_like.text import list_names

Weights = Mapping[str, Tensor]

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.|\[(\d+)\]$")
# by name of the format: the largest number, None for a float format that needs no scale
ROUNDED = (
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("fp8 e4m3", torch.float8_e4m3fn),
)
INTEGERS = (("int8", 127), ("int4", 7))
FP8_MAX = 448.0
EXPLAINED = 0.1  # of a difference, at most what its cause leaves unexplained
LOW_RANK = 1 / 3  # of the smaller dimension
LARGEST_RANK = 256  # of adapters


@dataclass(frozen=True, slots=True)
class Difference:
    """A weight that differs from the reference's."""

    name: str
    cause: str
    text: str
    size: float  # norm of the difference over that of the reference

    @property
    def layer(self) -> int | None:
        found = LAYER.search(self.name)
        return None if found is None else int(found[1])

    @property
    def expert(self) -> int | None:
        found = EXPERT.search(self.name)
        return None if found is None else int(found[1] or found[2])


def units(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The weights, of stacked ones each expert's: name[3]."""
    for name, tensor in weights.items():
        if tensor.dim() == 3 and ".experts" in name:
            yield from ((f"{name}[{expert}]", part) for expert, part in enumerate(tensor))
        else:
            yield name, tensor


Fingerprints = Mapping[str, tuple[object, ...]]


def fingerprints(weights: Weights) -> Fingerprints:
    """What is kept of weights to know them again."""
    return {name: _print(tensor) for name, tensor in units(weights)}


def _print(tensor: Tensor) -> tuple[object, ...]:
    """Equal for equal tensors, and hardly ever for others."""
    wide = tensor.double().contiguous()
    return (*tensor.shape, float(wide.sum()), float(wide.square().sum()))


class WeightComparison:
    """Compares weights with those of a reference.

    Args:
        reference: By name.
        dtype: Of the run, in which matrices may be: files often have wider routers.
        earlier: Fingerprints of earlier weights, by what they are ("weight version 3").
        base: The weights from which an adapter starts.
    """

    def __init__(
        self,
        reference: Weights,
        dtype: torch.dtype,
        earlier: Mapping[str, Fingerprints] | None = None,
        base: Weights | None = None,
    ) -> None:
        self._reference = dict(units(reference))
        self._dtype = dtype
        self._owners: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in self._reference.items():
            self._owners.setdefault(_print(tensor), []).append(name)
        self._earlier = earlier or {}
        self._base = dict(units(base or {}))

    def differences(self, weights: Weights) -> list[Difference]:
        """The weights that differ; names that the reference does not have are ignored."""
        found = []
        for name, tensor in units(weights):
            expected = self._reference.get(name)
            if expected is None:
                continue
            if tensor.shape == expected.shape and self._equal(tensor, expected):
                continue
            found.append(self._difference(name, tensor, expected))
        return found

    def _equal(self, tensor: Tensor, expected: Tensor) -> bool:
        """Whether they are equal in the tensor's dtype; a vector, such as the bias of experts,
        keeps its digits in every run."""
        if torch.equal(tensor, expected.to(tensor)):
            return True
        return tensor.dim() > 1 and torch.equal(tensor, expected.to(self._dtype).to(tensor))

    def _difference(self, name: str, tensor: Tensor, expected: Tensor) -> Difference:
        tensor = tensor.cpu()  # an engine's may be on a GPU
        expected = expected.cpu()
        wide = tensor.double()
        right = expected.double()
        if wide.shape != right.shape:
            text = f"{name} is {list(wide.shape)}, the reference's {list(right.shape)}"
            return Difference(name, "a weight of another shape", text, 1.0)
        if (odd := not_finite(wide, right)) is not None:
            return Difference(name, "not finite", f"{name} {odd}", math.inf)
        size = float((wide - right).norm() / right.norm().clamp(min=1e-30))
        cause, text = (
            self._other_weight(tensor)
            or constant(wide)
            or arranged(wide, right)
            or self._earlier_weight(name, wide)
            or scaled(wide, right)
            or rounded(tensor, expected)
            or self._adapter(name, wide, right)
            or partly(wide, right)
            or ("different weights", f"differs by {size:.3g} of its norm")
        )
        return Difference(name, cause, f"{name} {text}", size)

    def _other_weight(self, tensor: Tensor) -> tuple[str, str] | None:
        owners = [
            name
            for name in self._owners.get(_print(tensor), ())
            if torch.equal(self._reference[name].to(tensor), tensor)
        ]
        if not owners or constant(tensor) is not None:
            return None
        return "swapped weights", f"has the numbers of {list_names(owners)}"

    def _earlier_weight(self, name: str, wide: Tensor) -> tuple[str, str] | None:
        for title, old in self._earlier.items():
            if old.get(name) == _print(wide):
                return "stale weights", f"has the numbers of {title}"
        base = self._base.get(name)
        if base is not None and torch.equal(base.double(), wide):
            return "stale weights", "has the numbers of --hf-checkpoint"
        return None

    def _adapter(self, name: str, wide: Tensor, right: Tensor) -> tuple[str, str] | None:
        change = wide - right
        if change.dim() != 2 or min(change.shape) < 4:
            return None
        if (change == 0).all(dim=1).any() or (rank := low_rank(change)) is None:
            return None
        if name in self._base:
            update = right - self._base[name].double()
            share = float((change * update).sum() / update.square().sum().clamp(min=1e-60))
            if (change - share * update).norm() <= 1e-3 * change.norm():
                text = f"is --hf-checkpoint plus {1 + share:.3g} times its update, of rank {rank}"
                return "adapter merged a wrong number of times", text
        return "adapter", f"differs by a matrix of rank {rank}, as an adapter merged again or not"


def not_finite(wide: Tensor, right: Tensor) -> str | None:
    """What to say if one of them has numbers that are NaN or infinite; None if neither has."""
    counts = [int((~tensor.isfinite()).sum()) for tensor in (wide, right)]
    if not any(counts):
        return None
    return (
        f"has {counts[0]} of {wide.numel()} numbers that are NaN or infinite, the reference's "
        f"{counts[1]}"
    )


def low_rank(change: Tensor) -> int | None:
    """The rank of a matrix [M, N] that has a low one, of those singular values that are at least a
    thousandth of the largest; else None. By projection onto the range of a random sketch,
    arXiv 0909.4061, section 1.3: all singular values of a large matrix take minutes."""
    most = min(LARGEST_RANK, int(LOW_RANK * min(change.shape)))
    columns = min(most + 8, *change.shape)
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(change.size(1), columns, generator=generator, dtype=change.dtype)
    basis = torch.linalg.qr(change @ sketch).Q
    projected = basis.t() @ change
    if (change - basis @ projected).norm() > 1e-3 * change.norm():
        return None
    values = torch.linalg.svdvals(projected)
    rank = int((values > 1e-3 * values[0]).sum())
    return rank if rank <= most else None


def constant(wide: Tensor) -> tuple[str, str] | None:
    if wide.numel() > 1 and wide.min() == wide.max():
        return "missing weights", f"is {float(wide.flatten()[0]):g} everywhere, as if never loaded"
    return None


def arranged(wide: Tensor, right: Tensor) -> tuple[str, str] | None:
    """The same numbers in another order."""
    if wide.dim() != 2:
        same = torch.equal(wide.flatten().sort().values, right.flatten().sort().values)
        return ("swapped weights", "has the reference's numbers in another order") if same else None
    if torch.equal(wide.flatten(), right.t().flatten()):
        return "transposed weight", "is the reference's transposed"
    for kind, a, b in (("rows", wide, right), ("columns", wide.t(), right.t())):
        own = a.sum(dim=1).sort()
        expected = b.sum(dim=1).sort()
        if torch.equal(a[own.indices], b[expected.indices]):
            source = torch.empty_like(own.indices)
            source[own.indices] = expected.indices
            starts = [0]
            starts += [i + 1 for i, (x, y) in enumerate(pairwise(source.tolist())) if y != x + 1]
            ends = [*starts[1:], len(source)]
            block = min(end - start for start, end in zip(starts, ends))
            moved = [(s, int(source[s])) for s in starts if int(source[s]) != s]
            text = (
                f"has the reference's {kind} in another order, in blocks of {block} or more "
                f"({kind} {moved[0][0]} on are its {moved[0][1]} on)"
            )
            return ("heads in another order" if block > 1 else "swapped weights"), text
    return None


def scaled(wide: Tensor, right: Tensor) -> tuple[str, str] | None:
    """A factor or a summand, if it explains all of the difference but rounding."""
    gap = wide - right
    most = EXPLAINED * gap.norm()
    factor = float((wide * right).sum() / right.square().sum().clamp(min=1e-60))
    rest = (wide - factor * right).norm()
    if factor != 0 and rest <= 1e-5 * wide.norm() and rest <= most:
        return "wrong scale", f"is {factor:.6g} times the reference's"
    shift = gap.mean()
    rest = gap - shift
    if rest.abs().max() <= 1e-6 * float(right.abs().max()) and rest.norm() <= most:
        return "wrong scale", f"is the reference's plus {float(shift):.6g}"
    return None


def rounded(tensor: Tensor, expected: Tensor) -> tuple[str, str] | None:
    """Rounded to a format, without a scale or with one for the tensor or for each row."""
    for title, dtype in ROUNDED:
        if torch.equal(tensor, expected.to(dtype).to(tensor)):
            kind = "quantisation" if dtype.itemsize == 1 else "dtype"
            return kind, f"is the reference's rounded to {title}"
    wide = tensor.double()
    right = expected.double()
    if (wide - right).norm() > 0.2 * right.norm() or wide.dim() != 2:
        return None
    for scope, dims in (("row", (1,)), ("tensor", (0, 1))):
        largest = wide.abs().amax(dim=dims, keepdim=True).clamp(min=1e-30)
        for title, steps in INTEGERS:
            if steps < 127 and min(wide.shape) < 8:
                continue
            levels = wide / (largest / steps)
            if (levels - levels.round()).abs().max() < 1e-3 and steps <= 127:
                return "quantisation", f"has only the numbers of {title} with a scale by {scope}"
        levels = (wide / (largest / FP8_MAX)).float()
        if ((levels.to(torch.float8_e4m3fn).float() - levels).abs() <= 1e-3 * levels.abs()).all():
            return "quantisation", f"has only the numbers of fp8 with a scale by {scope}"
    return None


def partly(wide: Tensor, right: Tensor) -> tuple[str, str] | None:
    if wide.dim() != 2:
        return None
    rows = (wide != right).any(dim=1).nonzero()[:, 0].tolist()
    places = {row.numpy().tobytes(): i for i, row in enumerate(right)}
    moved = [(i, places.get(wide[i].numpy().tobytes())) for i in rows]
    known = [(i, place) for i, place in moved if place is not None]
    if len(known) > max(1, len(rows) / 2):
        text = f"{len(known)} rows are the reference's in another place"
        return "swapped weights", f"{text} (row {known[0][0]} is its {known[0][1]})"
    if len(rows) == wide.size(0):
        return None
    return "different weights", f"differs in {len(rows)} of {wide.size(0)} rows, {rows[0]} first"
