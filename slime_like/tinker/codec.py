"""Binary encoding of plain values for the workers and the journal: msgpack, without pickle.

Values are None, bool, int of 64 bits, float, str, bytes, lists, and dicts with string keys. Tuples
are decoded as lists.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

_SIZE = struct.Struct("<Q")
HEAD = _SIZE.size
Message = dict[str, Any]  # a decoded command or response


def encode(value: object) -> bytes:
    """Encode a value. Raises TypeError for unsupported types."""
    # A small buffer at first: a worker that is out of memory must be able to say so.
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass", buf_size=4096))


def decode(data: bytes) -> Any:
    """Inverse of `encode`. Raises ValueError for other bytes."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass")


def framed(data: bytes) -> bytes:
    """Prefix data with its size, for a stream."""
    return _SIZE.pack(len(data)) + data


def frame_size(head: bytes) -> int:
    """Size of a frame, from its first `HEAD` bytes."""
    return int(_SIZE.unpack(head)[0])
