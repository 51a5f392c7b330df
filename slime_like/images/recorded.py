"""Where recorded rollouts have their images."""

from __future__ import annotations

from pathlib import Path

IMAGES = "images"  # folder beside a recording


def image_path(folder: Path, digest: str) -> Path:
    """The file of an image; its name tells no format, since its content does."""
    return folder / f"{digest}.image"
