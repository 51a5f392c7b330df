"""Lossless delta encoding of a tensor: positions of changed elements, and the XOR of their bits.

At RL learning rates most bfloat16 weights are unchanged by an optimizer step, and most others move
to an adjacent value. So changed elements are stored as one-byte gaps between positions, and as the
XOR of old and new bits, split by byte significance; both compress well. A tensor that changed
everywhere has gaps of 0 in the same format.

    piece:   number of changed elements and of gap bytes (two uint64), gaps, XOR: least significant
             bytes, ...
    change:  the pieces of `PIECE` elements in their order, compressed by zlib
"""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

PIECE = 2**24  # elements per piece; bounds the memory needed in addition to the tensors
LEVEL = 1  # zlib compression level
INT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
LONG_GAP = 255  # gap byte for 255 unchanged elements that no changed element follows
_HEADER = struct.Struct("<QQ")


def encode(before: Tensor, after: Tensor, itemsize: int) -> bytes | None:
    """Encode the difference between two tensors; None if they are equal.

    Args:
        before, after: [bytes] uint8 on the CPU, of equal length.
        itemsize: Bytes per element: 1, 2, 4 or 8.
    """
    old = before.view(INT_TYPES[itemsize])
    new = after.view(INT_TYPES[itemsize])
    packer = zlib.compressobj(LEVEL)
    parts: list[bytes] = []
    changed = False
    for start in range(0, old.numel(), PIECE):
        difference = old[start : start + PIECE] ^ new[start : start + PIECE]
        positions = difference.nonzero().view(-1)
        changed = changed or positions.numel() > 0
        byte_planes = difference[positions].view(torch.uint8).view(-1, itemsize).t().contiguous()
        gaps = _gaps(positions)
        parts.append(packer.compress(_HEADER.pack(positions.numel(), gaps.numel())))
        parts += [packer.compress(_buffer(part)) for part in (gaps, byte_planes)]
    return b"".join([*parts, packer.flush()]) if changed else None


def apply(change: bytes, tensor: Tensor, itemsize: int) -> None:
    """Apply a change of `encode` to its `before` in place, which makes it `after`.

    Args:
        change: Result of `encode`.
        tensor: [bytes] uint8 on the CPU.

    Raises:
        ValueError: The change does not fit a tensor of this size. The tensor may be partly changed.
    """
    elements = tensor.view(INT_TYPES[itemsize])
    packer = zlib.decompressobj()
    rest = change

    def take(size: int) -> Tensor:
        nonlocal rest
        data = bytearray()
        while len(data) < size:
            block = packer.decompress(rest, size - len(data))
            if not block:
                raise ValueError("a change of weights ends early")
            rest = packer.unconsumed_tail
            data += block
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0)

    try:
        for start in range(0, elements.numel(), PIECE):
            piece = elements[start : start + PIECE]
            count, size = _HEADER.unpack(bytes(take(_HEADER.size).tolist()))
            if count > piece.numel() or size > count + piece.numel():
                raise ValueError("a change of weights is of another tensor")
            if count:
                positions = _positions(take(size), count, piece.numel())
                byte_planes = take(count * itemsize).view(itemsize, count)
                piece[positions] ^= byte_planes.t().contiguous().view(-1).view(elements.dtype)
    except zlib.error as error:
        raise ValueError(f"a change of weights is damaged: {error}") from error


def _gaps(positions: Tensor) -> Tensor:
    """Convert ascending positions to the number of unchanged elements before each, as bytes."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    long = gaps // LONG_GAP
    ends = torch.cumsum(long + 1, 0) - 1
    gap_bytes = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), LONG_GAP, dtype=torch.uint8)
    gap_bytes[ends] = (gaps % LONG_GAP).to(torch.uint8)
    return gap_bytes


def _positions(gaps: Tensor, count: int, size: int) -> Tensor:
    """The inverse of `_gaps`. Raises ValueError unless it gives `count` positions below `size`."""
    ends = gaps != LONG_GAP
    positions = torch.cumsum(gaps, 0, dtype=torch.int64)[ends]
    positions += torch.arange(len(positions))
    if len(positions) != count or int(positions[-1]) >= size:
        raise ValueError("a change of weights is of another tensor")
    return positions


def _buffer(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).numpy())  # type: ignore[arg-type]
