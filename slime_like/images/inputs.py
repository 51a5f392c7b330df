"""The input of a vision tower: pixels of some images, as the processor of the model makes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime_like.lazy import Tensor, torch


class ImageSource(Protocol):
    """I images, in the order of their placeholders, whose pixels need not exist before a tower
    takes them: they are a hundred times as large as the images' files."""

    @property
    def grids(self) -> Tensor | None:
        """See `ImageInputs`."""
        ...

    @property
    def num_images(self) -> int: ...

    @property
    def key(self) -> Hashable:
        """Equal for equal images of one run."""
        ...

    def load(self) -> ImageInputs: ...


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """I images, in the order of their placeholders.

    Towers that take patches (Qwen's) have one row per patch, and `grids`; towers that take whole
    images of one size (SigLIP) have one entry per image."""

    pixels: Tensor  # [P, D] float32 patches, or [I, channels, height, width] float32
    grids: Tensor | None = None  # [I, 3] int64: frames, rows and columns of patches of each image

    def __post_init__(self) -> None:
        if self.grids is not None and self.grids.device.type == "cpu":  # others would be waited for
            assert int(self.grids.prod(1).sum()) == self.pixels.size(0)

    @property
    def num_images(self) -> int:
        return int((self.pixels if self.grids is None else self.grids).size(0))

    @property
    def key(self) -> Hashable:
        return id(self)

    def load(self) -> ImageInputs:
        return self


class JoinedImages:
    """The images of all parts, at least one, in order."""

    def __init__(self, parts: Sequence[ImageSource]) -> None:
        self._parts = parts

    @property
    def grids(self) -> Tensor | None:
        return joined_grids(self._parts)

    @property
    def num_images(self) -> int:
        return sum(part.num_images for part in self._parts)

    @property
    def key(self) -> Hashable:
        return tuple(part.key for part in self._parts)

    def load(self) -> ImageInputs:
        return concatenate([part.load() for part in self._parts])


def concatenate(parts: Sequence[ImageInputs]) -> ImageInputs:
    """The images of all parts, at least one, in order."""
    if len(parts) == 1:
        return parts[0]
    return ImageInputs(torch.cat([part.pixels for part in parts]), joined_grids(parts))


def joined_grids(parts: Sequence[ImageSource]) -> Tensor | None:
    """The grids of all parts, in order."""
    grids = [part.grids for part in parts if part.grids is not None]
    return torch.cat(grids) if grids else None
