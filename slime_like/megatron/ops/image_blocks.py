"""Attention in both directions within an image (Gemma 3, arXiv 2503.19786, section 2.1): a token of
an image also attends to the image's tokens after it. Every token thus attends to a prefix of its
sequence, which ends at the token or at the end of its image."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.megatron.ops.context_parallel import ContextRows


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Successive queries of one sequence on this rank, and their keys: natural rows, as in
    context_parallel.py."""

    queries: slice  # own rows
    first: int  # natural row of the first query
    keys: slice  # natural rows: the sequence up to the last key that a query attends to
    causal: bool  # no image's token sees a later one


@dataclass(frozen=True, slots=True)
class ImageBlocks:
    """What the tokens of a micro-batch with images attend to."""

    last_visible: Tensor  # [T] int64: the last natural row that each natural row attends to
    spans: tuple[QuerySpan, ...]  # in the order of the rank's rows


def image_blocks(
    last_visible: Tensor, lengths: tuple[int, ...], context: ContextRows | None
) -> ImageBlocks:
    """The spans of one rank, on the host.

    Args:
        lengths: Of the full sequences.
        context: Of a context-parallel rank.
    """
    if context is None:
        ends = list(itertools.accumulate(lengths, initial=0))
        bounds = [(start, end, start, end) for start, end in itertools.pairwise(ends)]
    else:
        bounds = list(context.spans)
    spans = []
    for first, last, key_first, key_last in bounds:
        start = key_last - (last - first)
        visible = last_visible[start:key_last]
        spans.append(
            QuerySpan(
                slice(first, last),
                start,
                slice(key_first, int(visible.max()) + 1),
                torch.equal(visible, torch.arange(start, key_last)),
            )
        )
    return ImageBlocks(last_visible, tuple(spans))


def visible_keys(blocks: ImageBlocks, span: QuerySpan, before: int | None) -> Tensor:
    """Which keys of a span its queries attend to: [queries, keys] bool.

    Args:
        before: Largest distance of an earlier key; None: any.
    """
    count = span.queries.stop - span.queries.start
    last = blocks.last_visible[span.first : span.first + count]
    keys = torch.arange(span.keys.start, span.keys.stop, device=last.device)
    mask = keys <= last.unsqueeze(1)
    if before is None:
        return mask
    own = torch.arange(span.first, span.first + count, device=last.device)
    return mask & (keys >= own.unsqueeze(1) - before)
