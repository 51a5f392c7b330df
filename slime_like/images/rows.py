"""Images of a sequence: where their features go, and the positions of its tokens on several axes.

Qwen2-VL (arXiv 2409.12191, section 2.1, "multimodal rotary position embedding") gives every token a
position in time, height and width. Text has the same position on all axes, the next integer. The
features of an image have one time, and their row and column, counted from the image's start; the
text after it continues at the largest position so far plus one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from slime_like.images.inputs import ImageSource, JoinedImages
from slime_like.lazy import Tensor, torch

AXES = 3  # time, height, width


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Images of a sequence, or of the packed rows of a micro-batch."""

    inputs: ImageSource
    rows: Tensor  # [F] int64, ascending: the rows that take a feature instead of an embedding
    features: Tensor  # [F] int64: the feature that each of them takes
    # [3, T] int64: positions of all rows on the axes, also under context parallelism; None: the
    # model has one axis
    positions: Tensor | None = None
    # [T] int64, of all rows: the last row that each attends to, which is its own, and in an image
    # the image's last; None: its own everywhere
    last_visible: Tensor | None = None


@dataclass(eq=False, slots=True)
class ImagePass:
    """The images of a micro-batch in one pass through a model chunk."""

    images: ImageRows
    # [F, H] each, for the rows of `images`: what the outputs of the first layers get
    deepstack: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaceholderRule:
    """How a model writes images into its tokens."""

    image_token: int  # id of the placeholder of one feature
    # patches per feature, on each of height and width, of towers that take patches
    merge_size: int | None = None
    three_axes: bool = True  # with `merge_size`: the rotary embedding has three axes
    features: int | None = None  # of every image, of other towers
    both_directions: bool = False  # an image's tokens attend to all of its tokens


def image_rows(
    tokens: Tensor, inputs: ImageSource, rule: PlaceholderRule, sampled: Tensor | None = None
) -> ImageRows:
    """The images of one sequence.

    Args:
        tokens: [L] int64.
        inputs: Its images, in the order of their placeholders.
        sampled: [L] bool, tokens that the model wrote itself. A placeholder among them is a token
            like others, as for the engine, which had no feature for it.

    Raises:
        ValueError: The sequence has not one placeholder for each feature, or an image's are not
            together.
    """
    found = tokens == rule.image_token
    rows = (found if sampled is None else found & ~sampled).nonzero().squeeze(1)
    counts = feature_counts(inputs, rule)
    if sum(counts) != rows.numel():
        raise ValueError(
            f"{len(counts)} images have {sum(counts)} features, and the tokens "
            f"{rows.numel()} placeholders"
        )
    for own in rows.split(counts):
        if int(own[-1] - own[0]) != len(own) - 1:
            raise ValueError(
                f"the {len(own)} placeholders of the image at token {own[0]} are apart"
            )
    positions = None
    if rule.merge_size is not None and rule.three_axes:
        assert inputs.grids is not None, "of patches"
        starts = [int(own[0]) for own in rows.split(counts)]
        positions = rope_positions(int(tokens.numel()), inputs.grids, rule.merge_size, starts)
    last_visible = None
    if rule.both_directions:
        last_visible = torch.arange(tokens.numel())
        for own in rows.split(counts):
            last_visible[own] = own[-1]
    return ImageRows(inputs, rows, torch.arange(rows.numel()), positions, last_visible)


def rope_positions(length: int, grids: Tensor, merge_size: int, starts: Sequence[int]) -> Tensor:
    """Positions of one sequence of `length` L on the axes time, height and width: [3, L] int64.

    Args:
        grids: [I, 3] int64: frames, rows and columns of patches of each image.
        merge_size: Patches per feature, on each of height and width.
        starts: Place of the first feature of each image.
    """
    parts: list[Tensor] = []
    end = 0  # of the part of the sequence that has positions
    position = 0
    for (frames, height, width), start in zip(grids.tolist(), starts, strict=True):
        parts.append(_text(start - end, position))
        position += start - end
        sizes = (frames, height // merge_size, width // merge_size)
        axes = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + position)
        position += max(sizes)
        end = start + math.prod(sizes)
    parts.append(_text(length - end, position))
    return torch.cat(parts, dim=1)


def _text(length: int, start: int) -> Tensor:
    return torch.arange(start, start + length).expand(AXES, length)


def feature_counts(inputs: ImageSource, rule: PlaceholderRule) -> list[int]:
    """The number of features of each image."""
    if rule.merge_size is None:
        assert rule.features is not None
        return [rule.features] * inputs.num_images
    assert inputs.grids is not None
    return [int(n) // rule.merge_size**2 for n in inputs.grids.prod(1).tolist()]


def packed_images(
    sequences: Sequence[ImageRows | None], starts: Sequence[int], positions: Tensor
) -> ImageRows | None:
    """The images of packed rows; None if no sequence has any.

    Sequences with the same images, as the samples of one prompt have them, share their features, so
    that the tower sees these images once.

    Args:
        starts: First row of each sequence.
        positions: [T] int64, of all rows, as of text.
    """
    present = [(start, images) for start, images in zip(starts, sequences) if images is not None]
    if not present:
        return None
    distinct: list[ImageSource] = []
    first_feature: dict[Hashable, int] = {}  # of each distinct input, by its key
    total = 0
    for _, images in present:
        if images.inputs.key not in first_feature:
            distinct.append(images.inputs)
            first_feature[images.inputs.key] = total
            total += images.rows.numel()
    by_axis = None
    if present[0][1].positions is not None:
        by_axis = positions.repeat(AXES, 1)
        for start, images in present:
            assert images.positions is not None, "of one model"
            by_axis[:, start : start + images.positions.size(1)] = images.positions
    last_visible = None
    if present[0][1].last_visible is not None:
        last_visible = torch.arange(positions.numel())
        for start, images in present:
            assert images.last_visible is not None, "of one model"
            rows = slice(start, start + images.last_visible.numel())
            last_visible[rows] = images.last_visible + start
    return ImageRows(
        JoinedImages(distinct),
        torch.cat([images.rows + start for start, images in present]),
        torch.cat([images.features + first_feature[images.inputs.key] for _, images in present]),
        by_axis,
        last_visible,
    )


def select_rows(images: ImageRows, kept: Tensor, total: int) -> ImageRows:
    """The images of some of `total` rows. All images stay, because each of the ranks that share
    them runs the tower on all, and so does what is known of all rows: the rotary embedding takes
    the positions of the rank, and attention gathers keys.

    Args:
        kept: [T] int64, distinct rows, in the new order.
    """
    place = torch.full((total,), -1).index_copy(0, kept, torch.arange(kept.numel()))[images.rows]
    here = place >= 0
    order = place[here].argsort()
    rows = place[here][order]
    return replace(images, rows=rows, features=images.features[here][order])
