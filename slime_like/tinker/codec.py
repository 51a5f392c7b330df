"""Binary encoding of plain values, without pickle: JSON for the structure, then the byte strings
that it refers to.

Values are None, bool, int, float, str, bytes, lists, and dicts with string keys. Tuples are decoded
as lists.
"""

from __future__ import annotations

import json
import struct
from typing import Any

BYTES = "$bytes"  # {"$bytes": i} refers to the i-th byte string
_SIZE = struct.Struct("<Q")
HEAD = _SIZE.size
Message = dict[str, Any]  # a decoded command or response


def encode(value: object) -> bytes:
    """Encode a value. Raises TypeError for unsupported types, ValueError for a dict with the
    byte-string key."""
    blobs: list[bytes] = []

    def plain(item: object) -> object:
        if isinstance(item, bytes):
            blobs.append(item)
            return {BYTES: len(blobs) - 1}
        if isinstance(item, dict):
            if BYTES in item:
                raise ValueError(f"a dict has the key {BYTES}")
            return {key: plain(inner) for key, inner in item.items()}
        return [plain(inner) for inner in item] if isinstance(item, list | tuple) else item

    structure = plain(value)
    head = json.dumps([structure, [len(blob) for blob in blobs]]).encode()
    return b"".join([_SIZE.pack(len(head)), head, *blobs])


def decode(data: bytes) -> Any:
    """Inverse of `encode`."""
    (size,) = _SIZE.unpack_from(data)
    start = _SIZE.size + size
    structure, sizes = json.loads(data[_SIZE.size : start])
    blobs = []
    for length in sizes:
        blobs.append(data[start : start + length])
        start += length
    assert start == len(data), "frame size mismatch"

    def restore(item: object) -> object:
        if isinstance(item, list):
            return [restore(inner) for inner in item]
        if not isinstance(item, dict):
            return item
        if BYTES in item:
            return blobs[item[BYTES]]
        return {key: restore(inner) for key, inner in item.items()}

    return restore(structure)


def framed(data: bytes) -> bytes:
    """Prefix data with its size, for a stream."""
    return _SIZE.pack(len(data)) + data


def frame_size(head: bytes) -> int:
    """Size of a frame, from its first `HEAD` bytes."""
    return int(_SIZE.unpack(head)[0])
