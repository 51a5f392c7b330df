"""Small pictures of recorded rollouts, for the page."""

from __future__ import annotations

import io
from pathlib import Path

from slime_like.images.encoded import EncodedImage
from slime_like.images.files import DEFAULT_LIMITS, decode, pillow

LONGEST = 192  # pixels of a side
MAX_IMAGES = 2000  # on a page


class Thumbnails:
    """The distinct images of a page, in the order of their first use."""

    def __init__(self) -> None:
        self.urls: list[str | None] = []  # data URLs; None: the image cannot be shown
        self.left_out = 0  # images beyond the limit
        self._places: dict[str, int] = {}  # by digest

    def place(self, path: Path) -> int | None:
        """The index of an image in `urls`; None beyond the limit. path: of its file, which is named
        by its digest."""
        place = self._places.get(path.stem)
        if place is None and len(self.urls) < MAX_IMAGES:
            place = self._places[path.stem] = len(self.urls)
            self.urls.append(thumbnail(path))
        self.left_out += place is None
        return place


def thumbnail(path: Path) -> str | None:
    """A small copy of an image as a data URL; None if it is missing or damaged, or Pillow is not
    installed."""
    try:
        image = decode(EncodedImage(path.read_bytes()), DEFAULT_LIMITS)
        image.thumbnail((LONGEST, LONGEST), pillow().Resampling.LANCZOS)
        file = io.BytesIO()
        few_colours = image.size[0] * image.size[1] <= 64 * 64
        image.save(file, *(("PNG",) if few_colours else ("JPEG",)))
    except (ValueError, OSError):
        return None
    return EncodedImage(file.getvalue()).data_url
