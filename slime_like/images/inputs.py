"""The input of a vision tower: pixels of some images, as the processor of the model makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.lazy import Tensor, torch


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """I images, in the order of their placeholders.

    Towers that take patches (Qwen's) have one row per patch, and `grids`; towers that take whole
    images of one size (SigLIP) have one entry per image."""

    pixels: Tensor  # [P, D] float32 patches, or [I, channels, height, width] float32
    grids: Tensor | None = None  # [I, 3] int64: frames, rows and columns of patches of each image

    def __post_init__(self) -> None:
        assert self.grids is None or int(self.grids.prod(1).sum()) == self.pixels.size(0)

    @property
    def num_images(self) -> int:
        return int((self.pixels if self.grids is None else self.grids).size(0))


def concatenate(parts: Sequence[ImageInputs]) -> ImageInputs:
    """The images of all parts, at least one, in order."""
    if len(parts) == 1:
        return parts[0]
    grids = [part.grids for part in parts if part.grids is not None]
    return ImageInputs(
        torch.cat([part.pixels for part in parts]), torch.cat(grids) if grids else None
    )
