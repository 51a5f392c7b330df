"""Numbers that SGLang reports as base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_like.checked_json import InvalidResponse
from slime_like.text import shown


def decode_int32(name: str, encoded: str) -> NDArray[Any]:
    """Little-endian int32, in one dimension. name: Of the field. Raises InvalidResponse."""
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        raise InvalidResponse(f"{name} is not base64 of int32: {shown(encoded, 40)!r}") from None
