"""Groups: all samples of one prompt, and lists of samples as lists of groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from slime_like.types import T

if TYPE_CHECKING:
    from slime_like.samples.index import AnySample


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt; samples held by another rank are `RemoteSample`s."""

    group_id: int
    samples: tuple[AnySample, ...]


def flatten(groups: Iterable[SampleGroup]) -> list[AnySample]:
    """The samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


def split(items: Sequence[T], sizes: Sequence[int]) -> list[tuple[T, ...]]:
    """Consecutive parts of these sizes, which cover all items."""
    assert len(items) == sum(sizes), (len(items), sizes)
    remaining = iter(items)
    return [tuple(islice(remaining, size)) for size in sizes]


def regroup(groups: Iterable[SampleGroup], samples: Iterable[AnySample]) -> list[SampleGroup]:
    """The inverse of `flatten`: groups of the same sizes with these samples."""
    groups = list(groups)
    parts = split(list(samples), [len(group.samples) for group in groups])
    return [replace(g, samples=part) for g, part in zip(groups, parts)]
