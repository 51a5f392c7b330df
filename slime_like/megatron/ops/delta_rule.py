"""The gated delta rule and its short convolution over packed sequences, in plain torch.

Each head has a state S [dk, dv], zero before the first token of a sequence:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T,    o_t = S_t^T q_t

with decay a_t in (0, 1] and learning rate b_t in (0, 1) (Gated Delta Networks, arXiv 2412.06464,
equation 10). In Kimi delta attention (arXiv 2510.26692, equation 1) a_t is a vector, with a decay
for each row of the state, that is for each channel of the key.

A sequence is split into chunks. The updates that the tokens of a chunk write are the solution of a
triangular system, linear in the incoming state. The systems of all chunks of a micro-batch are
therefore solved at once, and only a few matrix products per chunk remain sequential. Step j
computes the j-th chunk of every sequence that has one: short sequences cost nothing while a long
one continues, and neither state nor gradient crosses sequences.

Every sum has a fixed order, so results are deterministic, forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens
# with a decay per channel: shorter for memory, since there are as many decays between two tokens of
# a chunk as a key has channels
CHANNEL_CHUNK = 16
EPSILON = 1e-6  # of the L2 norms of queries and keys, as in flash-linear-attention


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Indices between the rows of a micro-batch and chunks of C tokens, computed once per
    micro-batch.

    Chunks are ordered by step and, within a step, by decreasing sequence length, so that the
    sequences that continue in the next step come first.

    Args:
    """

    cu_seqlens: Tensor  # [S + 1]
    positions: Tensor  # [T], position of each row within its sequence
    # [N, C], row of each token of each chunk; T (a row of zeros) after the end of a sequence
    gather: Tensor
    scatter: Tensor  # [T], index of each row in the flattened chunks
    steps: tuple[int, ...]  # number of chunks of each step


def delta_rows(cu_seqlens: Tensor, lengths: Sequence[int], chunk: int = CHUNK) -> DeltaRows:
    """Split packed sequences into chunks of `chunk` tokens, or fewer if all sequences are shorter.

    Args:
        cu_seqlens: [S + 1], from 0 to T.
        lengths: The S sequence lengths, as host values.
    """
    chunk = min(chunk, max(lengths))
    by_length = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    counts = [-(-lengths[s] // chunk) for s in by_length]
    steps = tuple(sum(count > j for count in counts) for j in range(counts[0]))
    device = cu_seqlens.device
    starts = cu_seqlens[:-1].long()
    order = torch.tensor(by_length, device=device)
    rank = torch.cat([order[:n] for n in steps])  # [N]: the sequence of each chunk
    number = torch.repeat_interleave(
        torch.arange(len(steps), device=device), torch.tensor(steps, device=device)
    )
    positions_in_sequence = number.unsqueeze(1) * chunk + torch.arange(chunk, device=device)
    total = sum(lengths)
    is_token = positions_in_sequence < cu_seqlens.diff().long()[rank].unsqueeze(1)
    gather = torch.where(is_token, starts[rank].unsqueeze(1) + positions_in_sequence, total)
    scatter = torch.empty(total, dtype=torch.int64, device=device)
    scatter[gather[is_token]] = is_token.flatten().nonzero().squeeze(1)
    of_row = torch.repeat_interleave(cu_seqlens.diff().long(), output_size=total)
    positions = torch.arange(total, device=device) - starts[of_row]
    return DeltaRows(cu_seqlens, positions, gather, scatter, steps)


def causal_conv(x: Tensor, weight: Tensor, rows: DeltaRows) -> Tensor:
    """Causal depthwise convolution within each sequence, [T, channels].

    Args:
        x: [T, channels].
        weight: [channels, K], the last tap for the row itself.
    """
    taps = weight.unbind(1)
    out = x * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x[:-back], (0, 0, min(back, x.size(0)), 0))
        out = out + earlier.masked_fill((rows.positions < back).unsqueeze(1), 0.0) * tap
    return out


def unit(x: Tensor) -> Tensor:
    """L2-normalise the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, rows: DeltaRows
) -> Tensor:
    """The gated delta rule (see the module docstring) with L2-normalised queries and keys; queries
    are divided by sqrt(dk).

    Args:
        query, key: [T, groups, dk], each shared by heads / groups consecutive heads.
        value: [T, heads, dv].
        log_decay: log a, [T, heads], or [T, heads, dk] with a decay per channel of the key.
        rate: [T, heads], b.

    Returns:
        [T, heads, dv] in the dtype of `value`; computed in float32, or float64 for float64 inputs.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    share = value.size(1) // key.size(1)
    q, k = (unit(x.to(dtype)).repeat_interleave(share, dim=1) for x in (query, key))
    q = q * key.size(-1) ** -0.5
    inputs = (q, k, value.to(dtype), log_decay.to(dtype), rate.to(dtype))
    q, k, v, decay, b = (by_chunks(x, rows.gather) for x in inputs)  # [N, heads, C, ...]
    decay = decay.cumsum(2)
    if log_decay.dim() == 2:
        decay = decay.unsqueeze(-1)  # [N, heads, C, 1 or dk]
    between = _between(decay, k)
    since_start = decay.exp()
    to_end = (decay[..., -1:, :] - decay).exp()
    k_rate = k * b.unsqueeze(-1)
    system = _products(k_rate, k, between)  # its diagonal is taken as 1
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([v * b.unsqueeze(-1), k_rate * since_start], -1),
        upper=False,
        unitriangular=True,
    )
    writes, reads = solved.split([v.size(-1), k.size(-1)], -1)
    scores = _products(q, k, between)
    q = q * since_start
    k_end = (k * to_end).mT
    chunk_decay = since_start[..., -1:, :].mT
    out = _scan_chunks(writes, reads, scores, q, k_end, chunk_decay, rows.steps)
    return out.transpose(1, 2).flatten(0, 1)[rows.scatter].to(value.dtype)


def _between(decay: Tensor, key: Tensor) -> Tensor:
    """Decay a_{j+1} ... a_i between every two tokens i >= j of a chunk, 0 for i < j.

    Args:
        decay: log of the decay from the start of the chunk, [N, heads, C, 1 or dk].
        key: [N, heads, C, dk].

    Returns:
        [N, heads, C (i), C (j)]; with a decay per channel times key j, [N, heads, C, C, dk].
    """
    later = torch.ones(key.size(2), key.size(2), dtype=torch.bool, device=key.device).triu(1)
    difference = decay.unsqueeze(-2) - decay.unsqueeze(-3)
    # exp of a difference, which cannot overflow
    between = difference.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    return between.squeeze(-1) if decay.size(-1) == 1 else between * key.unsqueeze(-3)


def _products(x: Tensor, key: Tensor, between: Tensor) -> Tensor:
    """Products of every two tokens i >= j of a chunk, sum over channels of x_i k_j a_{j+1} ... a_i,
    [N, heads, C (i), C (j)].

    Args:
        x, key: [N, heads, C, dk].
        between: What `_between` returned.
    """
    if between.dim() == 4:
        return (x @ key.mT) * between
    return (x.unsqueeze(-2) @ between.mT).squeeze(-2)


def by_chunks(x: Tensor, gather: Tensor) -> Tensor:
    """[T, heads, ...] -> [N, heads, C, ...]."""
    with_zeros = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return with_zeros[gather].transpose(1, 2)


def _scan_chunks(
    writes: Tensor,
    reads: Tensor,
    scores: Tensor,
    query: Tensor,
    key: Tensor,
    chunk_decay: Tensor,
    steps: Sequence[int],
) -> Tensor:
    """Compute the outputs step by step, passing the state from chunk to chunk.

    Args:
        writes: [N, heads, C, dv], updates that a chunk writes if its incoming state is zero.
        reads: [N, heads, C, dk]; reads @ state is subtracted from them.
        scores: [N, heads, C, C], scores of the keys within the chunk.
        query: [N, heads, C, dk], decayed from the start of the chunk.
        key: [N, heads, dk, C], decayed to the end of the chunk.
        chunk_decay: [N, heads, 1 or dk, 1], decay over the chunk.

    Returns:
        [N, heads, C, dv].
    """
    parts = [x.split(list(steps)) for x in (writes, reads, scores, query, key, chunk_decay)]
    state: Tensor | None = None  # [chunks of the step, heads, dk, dv]
    outputs = []
    for number, (new, old, chunk_scores, q, k, decay) in enumerate(zip(*parts, strict=True)):
        if state is None:
            outputs.append(chunk_scores @ new)
        else:
            state = state[: new.size(0)]
            new = new - old @ state
            outputs.append(q @ state + chunk_scores @ new)
            state = state * decay
        if number + 1 < len(steps):
            state = k @ new if state is None else state + k @ new
    return torch.cat(outputs)


@functools.cache
def fla_rule(*, per_channel: bool) -> Callable[..., Tensor] | None:
    """`delta_rule` with flash-linear-attention's kernels, for bf16 on a GPU; None if the package is
    not installed. per_channel: for a decay per channel of the key."""
    try:
        if per_channel:
            from fla.ops.kda import chunk_kda as kernel
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    except ImportError:
        return None

    def rule(
        query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, rows: DeltaRows
    ) -> Tensor:
        share = value.size(1) // key.size(1)
        query, key = (x.repeat_interleave(share, dim=1) for x in (query, key))
        tensors = (x.unsqueeze(0).contiguous() for x in (query, key, value, log_decay, rate))
        out, _ = kernel(*tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=rows.cu_seqlens.long())
        result: Tensor = out.squeeze(0)
        return result

    return rule
