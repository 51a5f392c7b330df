"""n-grams of packed rows, the rows of the tables that they are hashed to, and the convolution of
what is read there. Nothing crosses the start of a sequence; n-grams do not cross a token that ends
one either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SMALLEST_FIT = 1e-6  # of a key and a stream, whose root has no slope at 0


@dataclass(frozen=True, slots=True)
class NgramRows:
    """The n-grams that end at each row, made once per pass."""

    tokens: Tensor  # [t, size] int64: of this rank's rows, and 1, 2, ... tokens before
    positions: Tensor  # [T], place of each natural row in its sequence


def ngram_rows(tokens: Tensor, cu_seqlens: Tensor, size: int, end: int) -> NgramRows:
    """The n-grams of natural rows.

    Args:
        tokens: [T] int64.
        cu_seqlens: [S + 1], from 0 to T.
        size: Number of tokens of the longest.
        end: Stands for tokens before the first of a sequence, and before the last `end` that
            precedes a token.
    """
    rows = torch.arange(tokens.numel(), device=tokens.device)
    bounds = cu_seqlens.to(tokens.device).long()
    starts = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    after_end = torch.where(tokens == end, rows + 1, 0)
    # an `end` begins nothing itself: it is the last token of what it ends
    after_earlier = F.pad(after_end[:-1], (1, 0)).cummax(0).values
    first = torch.maximum(starts, after_earlier)
    columns = [
        torch.where(rows - back >= first, tokens[(rows - back).clamp(min=0)], end)
        for back in range(size)
    ]
    return NgramRows(torch.stack(columns, 1), rows - starts)


def table_rows(
    tokens: Tensor, multipliers: Sequence[int], tables: Tensor, offsets: Tensor
) -> Tensor:
    """The row of each head, [t, heads].

    Args:
        tokens: [t, size], of `NgramRows`.
        multipliers: One for each of `size` tokens.
        tables, offsets: [heads] int64; heads of n-grams of two tokens, then of three, ...
    """
    products = [column * factor for column, factor in zip(tokens.unbind(1), multipliers)]
    hashes = [reduce(torch.bitwise_xor, products[:n]) for n in range(2, len(products) + 1)]
    repeated = torch.stack(hashes, 1).repeat_interleave(tables.numel() // len(hashes), dim=1)
    return repeated % tables + offsets


def dilated_conv(x: Tensor, weight: Tensor, dilation: int, positions: Tensor) -> Tensor:
    """Causal depthwise convolution within each sequence, [T, channels].

    Args:
        x: [T, channels].
        weight: [channels, K], the last tap for the row itself.
        dilation: Rows between two taps.
        positions: [T], of `NgramRows`.
    """
    taps = weight.unbind(1)
    out = x * taps[-1]
    for number, tap in enumerate(reversed(taps[:-1]), start=1):
        back = number * dilation
        earlier = F.pad(x[:-back], (0, 0, min(back, x.size(0)), 0))
        out = out + earlier.masked_fill((positions < back).unsqueeze(1), 0.0) * tap
    return out


def _recall(
    streams: Tensor,
    entries: Tensor,
    key: Tensor,
    value: Tensor,
    key_norm: Tensor,
    query_norm: Tensor,
    conv_norm: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """See `recall`."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = F.rms_norm(wide, wide.shape[-1:], eps=epsilon)
        return (unit * (1.0 + weight.to(wide.dtype).view_as(unit[0]))).to(x.dtype)

    keys = normed(F.linear(entries, key).view_as(streams), key_norm)
    fit = (keys * normed(streams, query_norm)).sum(-1, keepdim=True) / streams.size(-1) ** 0.5
    gates = (fit.abs().clamp_min(SMALLEST_FIT).sqrt() * fit.sign()).sigmoid()
    recalled = gates * F.linear(entries, value).unsqueeze(1)
    return recalled, normed(recalled, conv_norm)


def recall(
    streams: Tensor,
    entries: Tensor,
    key: Tensor,
    value: Tensor,
    key_norm: Tensor,
    query_norm: Tensor,
    conv_norm: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """What each residual stream takes from the memory, by how well a key of the entry fits the
    stream; computed again in backward.

    Args:
        streams: [t, N, H].
        entries: [t, E], of the memory.
        key, value: [N H, E] and [H, E].
        key_norm, query_norm, conv_norm: [N H], zero-centred, of norms of a stream each.
        epsilon: Of the norms.

    Returns:
        That and, normalised, the input of the convolution; [t, N, H] each.
    """
    weights = (key, value, key_norm, query_norm, conv_norm)
    found: Sequence[Tensor] = checkpoint(
        _recall, streams, entries, *weights, epsilon, use_reentrant=False
    )
    recalled, normed = found
    return recalled, normed
