"""Quantised weights: dequantise to float32 in blocks of rows, and quantise new values.

The format is given by the folder's config.json (arguments/hf/quantization.py), and the set of
quantised weights by its files: weights that the publisher excluded (`modules_to_not_convert`,
`ignore`) are plain tensors.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.hf.quantization import SUPPORTED, Quantization
from slime_like.config import SMALLEST_FLOAT32
from slime_like.weights.export_plan import TensorPlan

ReadRows = Callable[[str, int, int], Tensor]  # a stored tensor's rows [first, last)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
CHUNK_ELEMENTS = 2**22  # elements of a weight that are in float32 at a time
MX_COLUMNS = 32  # columns per scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# bias of a scale's exponent, and its NaN code
MX_BIAS = 127
MX_NAN = 255
# Scales of activations and of the KV cache, which are not trained.
OTHER_SCALES = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class QuantizedWeight(ABC):
    """A weight that is stored as several tensors."""

    name: str
    shape: tuple[int, ...]  # of the weight
    stored: tuple[TensorPlan, ...]  # these tensors, sorted by descending dtype width

    @abstractmethod
    def decode(self, read: ReadRows, first: int, last: int) -> Tensor:
        """Dequantise rows [first, last) along the first dimension to float32. Raises ValueError if
        the stored data is not a number."""

    @abstractmethod
    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise a new value of the weight: the tensors of `stored`, on its device."""

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split [start, stop) into ranges of complete blocks with about `CHUNK_ELEMENTS` elements
        each."""
        many = max(1, CHUNK_ELEMENTS // max(1, math.prod(self.shape[1:])))
        while start < stop:
            last = min(stop, start + many)
            yield start, last
            start = last


@dataclass(frozen=True, slots=True)
class ScaledMatrix(QuantizedWeight):
    """[rows, columns]: codes times scales of shape [rows / block rows, columns / block columns],
    rounded up."""

    codes: str  # names of the stored tensors
    scales: str  # names of the stored tensors
    scale_dtype: torch.dtype
    block: tuple[int, int]  # size of a block; 0 for all rows or columns

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one scale's block."""
        return self.block[0] or max(1, self.shape[0]), self.block[1] or max(1, self.shape[1])

    def decode(self, read: ReadRows, first: int, last: int) -> Tensor:
        values = self._values(read, first, last)
        rows, columns = self.tile
        low = first // rows
        high = -(-last // rows)
        scales = read(self.scales, low, high).float().view(high - low, -1)
        scales = scales[torch.arange(first, last) // rows - low]
        full_columns = self.shape[1] // columns * columns
        values[:, :full_columns].unflatten(1, (-1, columns)).mul_(
            scales[:, : full_columns // columns].unsqueeze(-1)
        )
        values[:, full_columns:].mul_(scales[:, -1:])
        return values

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        plans = {plan.name: plan for plan in self.stored}
        rows = self.tile[0]
        chunk_rows = max(1, CHUNK_ELEMENTS // max(1, rows * self.shape[1])) * rows
        codes = []
        scales = []
        for start in range(0, self.shape[0], chunk_rows):
            part_codes, part_scales = self._encode_rows(weight[start : start + chunk_rows].float())
            codes.append(part_codes)
            scales.append(part_scales)
        tensors = {self.codes: torch.cat(codes), self.scales: torch.cat(scales)}
        return {name: tensor.view(plans[name].shape) for name, tensor in tensors.items()}

    def _tiles(self, weight: Tensor) -> Tensor:
        """Split into blocks: [scale rows, rows, scale columns, columns], zero-padded."""
        rows, columns = self.tile
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        padded = F.pad(weight, padding)
        return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))

    def _untiled(self, tiles: Tensor, rows: int) -> Tensor:
        return tiles.flatten(2).flatten(0, 1)[:rows, : self.shape[1]]

    @abstractmethod
    def _values(self, read: ReadRows, first: int, last: int) -> Tensor:
        """Unscaled values of the codes, float32 [last - first, columns]."""

    @abstractmethod
    def _encode_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of complete blocks of rows, float32 [n, columns]."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix(ScaledMatrix):
    """FP8 matrix with e4m3 codes."""

    power_of_two: bool  # new scales are rounded up to powers of two

    def _values(self, read: ReadRows, first: int, last: int) -> Tensor:
        return read(self.codes, first, last).float()

    def _encode_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        tiles = self._tiles(weight)
        scales = tiles.abs().amax(dim=(1, 3)) / FP8_MAX
        scales = torch.where(scales > 0, scales.clamp(min=SMALLEST_FLOAT32), scales)
        if self.power_of_two or self.scale_dtype == torch.float8_e8m0fnu:
            mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
            powers = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
            # frexp gives the exponent 0 where there is no number
            scales = torch.where(scales.isfinite(), powers, math.nan)
        scales = _never_zero(scales.to(self.scale_dtype))
        # times the reciprocal, as DeepGEMM and both engines have it: a division rounds one code in
        # some thousands otherwise
        scaled = tiles * scales.float().reciprocal()[:, None, :, None]
        codes = self._untiled(scaled.clamp_(-FP8_MAX, FP8_MAX), len(weight)).to(FP8)
        return codes, scales


@dataclass(frozen=True, slots=True)
class PackedMatrix(ScaledMatrix):
    """Matrix of packed integers: codes of `bits` bits, offset by half their range, packed into
    int32 words from the lowest bits up."""

    size: str  # the stored tensor that contains the weight's shape
    bits: int

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(0, 32, self.bits, dtype=torch.int32)

    def _values(self, read: ReadRows, first: int, last: int) -> Tensor:
        shape = tuple(read(self.size, 0, 2).tolist())
        if shape != self.shape:
            raise ValueError(
                f"{self.size} is {list(shape)}, but {self.codes} and {self.scales} are those of a "
                f"weight {list(self.shape)}; copy the file again"
            )
        words = read(self.codes, first, last)
        codes = (words.unsqueeze(-1) >> self._shifts) & (2**self.bits - 1)
        return codes.flatten(1)[:, : self.shape[1]].float().sub_(2 ** (self.bits - 1))

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        dtype = next(plan.dtype for plan in self.stored if plan.name == self.size)
        size = torch.tensor(self.shape, dtype=dtype, device=weight.device)
        # not super(): dataclass(slots=True) replaces the class object that super() refers to
        return {**ScaledMatrix.encode(self, weight), self.size: size}

    def _encode_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round to nearest with one of two scales that avoid clipping, whichever has the smaller
        error. This way an unchanged weight is quantised to the codes that it was loaded from."""
        tiles = self._tiles(weight)
        half = 2 ** (self.bits - 1)
        maximum = tiles.amax(dim=(1, 3))
        minimum = tiles.amin(dim=(1, 3))
        first = self._quantize(tiles, torch.maximum(maximum / (half - 1), -minimum / half))
        second = self._quantize(tiles, torch.maximum(maximum, -minimum) / (half - 1))
        better = second[2] < first[2]
        codes = torch.where(better[:, None, :, None], second[0], first[0])
        scales = torch.where(better, second[1], first[1])
        return self._packed(self._untiled(codes, len(weight)).long() + half), scales

    def _quantize(self, tiles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales in their dtype, and squared error of each tile."""
        half = 2 ** (self.bits - 1)
        scales = _never_zero(scales.to(self.scale_dtype))
        step = scales.float()[:, None, :, None]
        codes = (tiles / step).round_().clamp_(-half, half - 1)
        return codes, scales, (codes * step - tiles).square_().sum(dim=(1, 3))

    def _packed(self, codes: Tensor) -> Tensor:
        """Pack unsigned codes [n, columns] into [n, words] int32; unused bits of the last word are
        0."""
        shifts = self._shifts.long().to(codes.device)
        padded = F.pad(codes, (0, -codes.shape[1] % len(shifts))).unflatten(1, (-1, len(shifts)))
        words = (padded << shifts).sum(-1)
        return torch.where(words < 2**31, words, words - 2**32).int()


@dataclass(frozen=True, slots=True)
class MxExperts(QuantizedWeight):
    """The experts of a layer [experts, columns, rows] in MXFP4, stored transposed: [experts, rows,
    groups, 16] bytes of two e2m1 numbers each, the first in the low half, and [experts, rows,
    groups] power-of-two scales, one per group of 32 numbers."""

    blocks: str
    scales: str

    def decode(self, read: ReadRows, first: int, last: int) -> Tensor:
        codes = read(self.blocks, first, last)
        scales = read(self.scales, first, last)
        if (scales == MX_NAN).any():
            raise ValueError(f"{self.scales} has scales {MX_NAN}, which are no numbers")
        numbers = torch.tensor([*E2M1, *(-value for value in E2M1)])
        powers = torch.tensor([2.0 ** (exponent - MX_BIAS) for exponent in range(MX_NAN)])
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [experts, rows, G, 32]
        values = numbers[pairs.int()] * powers[scales.int()].unsqueeze(-1)
        return values.flatten(2).transpose(1, 2)

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        blocks = []
        scales = []
        for expert in weight:  # [columns, rows]
            codes, exponents = _mx_codes(
                expert.float().t().contiguous().unflatten(1, (-1, MX_COLUMNS))
            )
            blocks.append(codes[..., 0::2] | codes[..., 1::2] << 4)
            scales.append(exponents)
        return {self.blocks: torch.stack(blocks), self.scales: torch.stack(scales)}


def _mx_codes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 codes [..., 32] of groups of float32 and codes of their scales [...], uint8 each.

    The scale is the smallest power of two at which nothing is clipped, as in SGLang's quantiser
    (the MX specification's own rule, floor(log2 amax) - 2, clips up to a quarter of the largest
    value). Rounded to nearest, ties to the smaller magnitude. A group with a number that is not
    finite gets the scale that stands for NaN.
    """
    largest = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest / E2M1[-1])  # mantissa in [0.5, 1)
    exponent = torch.where(largest > 0, exponent - (mantissa == 0.5).int(), -MX_BIAS)
    exponent = exponent.clamp(-MX_BIAS, MX_BIAS)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    bounds = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    codes = torch.bucketize(scaled.abs(), torch.tensor(bounds, device=groups.device))
    codes += 8 * (groups < 0)
    scales = torch.where(torch.isfinite(largest), exponent + MX_BIAS, MX_NAN)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def _never_zero(scales: Tensor) -> Tensor:
    """Replace scales of 0, which blocks of zeros have, by 1."""
    return torch.where(scales.float() == 0, torch.ones_like(scales), scales)


class _Finder:
    """Finds the quantised weights among a folder's tensors."""

    def __init__(
        self, tensors: Mapping[str, TensorPlan], format_: Quantization, folder: str
    ) -> None:
        self._tensors = tensors
        self._format = format_
        self._folder = folder

    def all(self) -> Iterator[QuantizedWeight]:
        for name, plan in self._tensors.items():
            if self._format.kind == "fp8" and plan.dtype == FP8:
                yield self._fp8(plan)
            elif self._format.kind == "packed" and name.endswith(".weight_packed"):
                yield self._packed(plan)
            elif self._format.kind == "mxfp4" and name.endswith("_blocks"):
                yield self._mxfp4(plan)

    def _fp8(self, plan: TensorPlan) -> QuantizedWeight:
        if not plan.name.endswith(".weight") or len(plan.shape) != 2:
            raise self._wrong(plan, "is fp8 and no .weight of two dimensions")
        stem = plan.name.removesuffix("weight")
        scales = self._stored(plan, [stem + suffix for suffix in self._format.scales])
        self._check_scales(plan, scales, plan.shape)
        return Fp8Matrix(
            plan.name, plan.shape, (scales, plan), plan.name, scales.name, scales.dtype,
            self._format.block, self._format.power_of_two,
        )  # fmt: skip

    def _packed(self, plan: TensorPlan) -> QuantizedWeight:
        stem = plan.name.removesuffix("weight_packed")
        scales = self._stored(plan, [stem + suffix for suffix in self._format.scales])
        size = self._stored(plan, [f"{stem}weight_shape"])
        for unsupported in ("weight_zero_point", "weight_g_idx"):
            if stem + unsupported in self._tensors:
                raise self._wrong(plan, f"has a {unsupported}")
        if len(plan.shape) != 2 or plan.dtype != torch.int32:
            raise self._wrong(plan, "is not of two dimensions and int32")
        if size.shape != (2,) or size.dtype not in (torch.int32, torch.int64):
            raise self._wrong(size, "is not two integers")
        in_word = 32 // self._format.bits
        columns = plan.shape[1] * in_word
        if self._format.block[1] and len(scales.shape) == 2:
            columns = scales.shape[1] * self._format.block[1]
        shape = (plan.shape[0], columns)
        if -(-columns // in_word) != plan.shape[1]:
            raise self._wrong(scales, f"has other columns than {plan.name} {list(plan.shape)}")
        self._check_scales(plan, scales, shape)
        widest_first = tuple(sorted((size, plan, scales), key=lambda p: -p.dtype.itemsize))
        return PackedMatrix(
            f"{stem}weight", shape, widest_first, plan.name, scales.name, scales.dtype,
            self._format.block, size.name, self._format.bits,
        )  # fmt: skip

    def _mxfp4(self, plan: TensorPlan) -> QuantizedWeight:
        stem = plan.name.removesuffix("_blocks")
        scales = self._stored(plan, [stem + suffix for suffix in self._format.scales])
        if len(plan.shape) != 4 or plan.shape[3] * 2 != MX_COLUMNS or plan.dtype != torch.uint8:
            raise self._wrong(plan, "is not [experts, rows, groups, 16] of bytes")
        if scales.shape != plan.shape[:3] or scales.dtype != torch.uint8:
            raise self._wrong(scales, f"is not {list(plan.shape[:3])} of bytes")
        experts, rows, groups, _ = plan.shape
        shape = (experts, groups * MX_COLUMNS, rows)
        return MxExperts(stem, shape, (plan, scales), plan.name, scales.name)

    def _stored(self, plan: TensorPlan, names: list[str]) -> TensorPlan:
        for name in names:
            if name in self._tensors:
                return self._tensors[name]
        raise self._wrong(plan, f"has no {' or '.join(names)}")

    def _check_scales(self, plan: TensorPlan, scales: TensorPlan, shape: tuple[int, ...]) -> None:
        if not scales.dtype.is_floating_point or scales.dtype == FP8:
            raise self._wrong(scales, "has no scales")
        tile = [size or whole for size, whole in zip(self._format.block, shape, strict=True)]
        grid = tuple(-(-n // max(1, size)) for n, size in zip(shape, tile, strict=True))
        legal = {grid}
        if grid[1] == 1:
            legal.add(grid[:1])
        if grid == (1, 1):
            legal.add(())
        if scales.shape not in legal:
            raise self._wrong(
                scales, f"must be {list(grid)} for {plan.name}, a weight {list(shape)}"
            )

    def _wrong(self, plan: TensorPlan, what: str) -> ValueError:
        return ValueError(
            f"weights in {self._folder}: {plan.name} ({plan.dtype}, {list(plan.shape)}) {what}; "
            f"{SUPPORTED}"
        )


def find_quantized_weights(
    tensors: Mapping[str, TensorPlan], format_: Quantization, folder: str
) -> dict[str, QuantizedWeight]:
    """The quantised weights of a folder, by name. tensors: all stored tensors. Raises ValueError
    naming a tensor that is missing or inconsistent with the format."""
    return {weight.name: weight for weight in _Finder(tensors, format_, folder).all()}


def stored_plans(
    plan: TensorPlan, quantized: Mapping[str, QuantizedWeight]
) -> tuple[TensorPlan, ...]:
    """The tensors as which a weight is stored."""
    return quantized[plan.name].stored if plan.name in quantized else (plan,)


def encode_tensors(
    tensors: Mapping[str, Tensor], quantized: Mapping[str, QuantizedWeight]
) -> dict[str, Tensor]:
    """Quantise weights for storage: those in `quantized` become several tensors, others are
    unchanged."""
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        encoded |= quantized[name].encode(tensor) if name in quantized else {name: tensor}
    return encoded
