"""Hyper-connections, which replace the residual connection of a block f by N residual streams
X_1 ... X_N. Their weights are functions of all streams of the token.

Manifold-constrained ones (mHC, arXiv 2512.24880; DeepSeek-V4 and GLM-5.3):

    u = sum_n a_n X_n,    X'_n = b_n f(norm(u)) + sum_m C_mn X_m

C is nearly doubly stochastic: its columns sum to 1, its rows nearly so. (megatron-core's main
branch of August 2026 mixes by the transpose of C, and has other epsilons.)

Gated ones (Qwen3.8-Flash-Next), with Y_n = norm(X_n), and a gate g_n for each channel:

    u = mean_n g_n * Y_n,    X'_n = X_n + b_n f(u)

Whatever a block reads is computed again in backward: the weights and their steps would take several
times the memory of the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCALES = 3  # of a, b and C


def number_of_weights(streams: int) -> int:
    """Of one token: a and b, and the matrix C."""
    return (2 + streams) * streams


def sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Make matrices [..., N, N] nearly doubly stochastic (Sinkhorn and Knopp 1967): a softmax of
    each row, then columns, and `iterations` - 1 times rows and columns are divided by their sums.
    `epsilon` is added to each entry of the softmax and to each sum."""
    weights = logits.softmax(-1) + epsilon
    weights = weights / (weights.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
        weights = weights / (weights.sum(-2, keepdim=True) + epsilon)
    return weights


def _scores(wide: Tensor, weight: Tensor, norm_epsilon: float) -> Tensor:
    """[T, N, H] -> [T, n]: products of the normalised streams of a token and the weight [n, N H].
    wide: in float32 or wider."""
    flat = wide.flatten(1)
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_epsilon)
    return F.linear(flat, weight.to(wide.dtype)) * norm


def _weighted_sum(wide: Tensor, weights: Tensor) -> Tensor:
    """[T, N, H] and [T, N] -> [T, 1, H]."""
    return (weights.unsqueeze(-1) * wide).sum(1, keepdim=True)


def _read(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_epsilon: float,
    epsilon: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `read_streams`."""
    number = streams.size(1)
    dtype = torch.promote_types(streams.dtype, torch.float32)
    wide = streams.to(dtype)
    scores = _scores(wide, weight, norm_epsilon)
    sizes = (number, number, number * number)
    parts = zip(scores.split(sizes, -1), scale.to(dtype), base.to(dtype).split(sizes), strict=True)
    reading, writing, mixing = (score * factor + bias for score, factor, bias in parts)
    mixing = sinkhorn(mixing.unflatten(-1, (number, number)), iterations, epsilon)
    return (
        _weighted_sum(wide, reading.sigmoid() + epsilon).to(streams.dtype),
        (2 * writing.sigmoid()).to(streams.dtype),
        mixing.to(streams.dtype),
    )


def read_streams(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_epsilon: float,
    epsilon: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a block, and how its output is written. Computed in float32 or wider.

    Args:
        streams: [T, N, H].
        weight: [(2 + N) N, N H], of a, b and the rows of C.
        base: [(2 + N) N], added to their products, which are multiplied by
        scale: [3], of a, b and C.
        norm_epsilon: Of the root mean square over all streams of a token.
        epsilon: Added to a, and see `sinkhorn`.
        iterations: See `sinkhorn`.

    Returns:
        u [T, 1, H], b [T, N] and C [T, N, N], in the dtype of the streams.
    """
    settings = (norm_epsilon, epsilon, iterations)
    found: Sequence[Tensor] = checkpoint(
        _read, streams, weight, base, scale, *settings, use_reentrant=False
    )
    block_input, writing, mixing = found
    return block_input, writing, mixing


def write_streams(streams: Tensor, output: Tensor, writing: Tensor, mixing: Tensor) -> Tensor:
    """The streams after a block, [T, N, H].

    Args:
        streams: Those before it.
        output: Of the block, [T, 1, H].
        writing, mixing: Of `read_streams`.
    """
    return torch.baddbmm(writing.unsqueeze(-1) * output, mixing.mT, streams)


def _read_gated(
    streams: Tensor,
    norm_weight: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """See `read_gated_streams`."""
    number = streams.size(1)
    wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
    normed = F.rms_norm(wide, wide.shape[-1:], eps=norm_epsilon)
    normed = (normed * (1.0 + norm_weight.to(wide.dtype).view_as(normed[0]))).to(streams.dtype)
    flat = normed.flatten(1)
    gates = F.linear(F.silu(F.linear(flat, down) / number), up).sigmoid()
    block_input = (gates.view_as(normed) * normed).mean(1, keepdim=True)
    if inject is None:
        return block_input, None
    return block_input, 2 * (F.linear(flat, inject) / number).sigmoid()


def read_gated_streams(
    streams: Tensor,
    norm_weight: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """The input of a block, and the weights of its output.

    Args:
        streams: [T, N, H].
        norm_weight: [N H], zero-centred, of the norm of each stream.
        down, up: [rank, N H] and [N H, rank], of the gates.
        inject: [N, N H], of the weights b; None at the end of the network.
        norm_epsilon: Of the root mean square of a stream.

    Returns:
        u [T, 1, H], and b [T, N] or None.
    """
    found: Sequence[Any] = checkpoint(
        _read_gated, streams, norm_weight, down, up, inject, norm_epsilon, use_reentrant=False
    )
    block_input, writing = found
    return block_input, writing


def write_gated_streams(streams: Tensor, output: Tensor, writing: Tensor) -> Tensor:
    """Like `write_streams`, with the weights of `read_gated_streams`."""
    return streams + writing.unsqueeze(-1) * output


def sum_of_streams(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_epsilon: float,
    epsilon: float,
) -> Tensor:
    """What DeepSeek-V4 reads at the end: a sum with weights like those of `read_streams`.

    Args:
        streams: [T, N, H].
        weight, base, scale: [N, N H], [N] and [1], of a.
        norm_epsilon, epsilon: See `read_streams`.

    Returns:
        [T, 1, H].
    """
    settings = (norm_epsilon, epsilon)
    found: Tensor = checkpoint(_sum, streams, weight, base, scale, *settings, use_reentrant=False)
    return found


def _sum(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_epsilon: float,
    epsilon: float,
) -> Tensor:
    """See `sum_of_streams`."""
    dtype = torch.promote_types(streams.dtype, torch.float32)
    scores = _scores(streams.to(dtype), weight, norm_epsilon)
    reading = (scores * scale.to(dtype) + base.to(dtype)).sigmoid() + epsilon
    return _weighted_sum(streams.to(dtype), reading).to(streams.dtype)


def spread(hidden: Tensor, streams: int) -> Tensor:
    """[T, 1, H] -> [T, N, H], all streams alike."""
    return hidden.repeat(1, streams, 1)


def mean_of_streams(streams: Tensor) -> Tensor:
    """[T, N, H] -> [T, 1, H]."""
    return streams.mean(1, keepdim=True)
