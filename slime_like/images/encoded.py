"""An image as the file that a row, a tool or a request gave.

Samples carry these bytes, never pixels, which are a hundred times as many: whoever needs pixels
makes them from the same bytes with the same function (`images/processor.py`), so that trainer and
local engine see equal numbers.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A PNG, JPEG, WebP, GIF or BMP file."""

    data: bytes = field(repr=False)
    digest: str = field(init=False, compare=False)  # SHA-256 of the data, in hexadecimal

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())

    @property
    def kind(self) -> str:
        """The format, as in a MIME type: png, jpeg, webp, gif or bmp."""
        return next((kind for start, kind in _STARTS.items() if self.data.startswith(start)), "png")

    @property
    def data_url(self) -> str:
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode()}"


_STARTS = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpeg",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
}
