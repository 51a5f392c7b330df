"""The state space model of Mamba-2 over packed sequences, in plain torch.

Each head has a state S [n, p], zero before the first token of a sequence:

    S_t = a_t S_{t-1} + d_t B_t x_t^T,    y_t = S_t^T C_t,    a_t = exp(d_t A), A < 0

with a step size d_t > 0 and B_t, C_t [n] that the heads of a group share (arXiv 2405.21060,
equation 1 with the discretisation of its section 2.1, and section 6 for the algorithm in chunks).

Chunks and steps are those of `delta_rule`: step j computes the j-th chunk of every sequence that
has one, neither state nor gradient crosses sequences, and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.megatron.ops.delta_rule import DeltaRows, by_chunks


def state_space(
    read: Tensor, write: Tensor, x: Tensor, step: Tensor, log_decay: Tensor, rows: DeltaRows
) -> Tensor:
    """Outputs y of the state space model (see the module docstring), without the skip term.

    Args:
        read, write: C and B, [T, groups, n], each shared by heads / groups consecutive heads.
        x: [T, heads, p].
        step: d, [T, heads].
        log_decay: log a, [T, heads].

    Returns:
        [T, heads, p] in float32, or float64 for float64 inputs.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    groups = read.size(1)
    written = x.to(dtype) * step.to(dtype).unsqueeze(-1)
    c, b = (by_chunks(t.to(dtype), rows.gather).unsqueeze(2) for t in (read, write))
    v, decay = (
        by_chunks(t.to(dtype), rows.gather).unflatten(1, (groups, -1)) for t in (written, log_decay)
    )  # [N, groups, heads of a group, C, ...]
    decay = decay.cumsum(-1)
    later = torch.ones(*(2 * rows.gather.shape[1:]), dtype=torch.bool, device=x.device).triu(1)
    # exp of differences, which cannot overflow: a_{j+1} ... a_i for tokens i >= j
    between = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    between = between.masked_fill(later, -torch.inf).exp()
    within = ((c @ b.mT) * between) @ v
    to_end = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    updates = b.mT @ (v * to_end)  # of the state, by the whole chunk
    since_start = decay.exp().unsqueeze(-1)
    out = within + _read_states(c, since_start, updates, rows.steps)
    return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)[rows.scatter]


def _read_states(
    read: Tensor, since_start: Tensor, updates: Tensor, steps: Sequence[int]
) -> Tensor:
    """What the tokens of each chunk read from the state before it, which passes from step to step.

    Args:
        read: [N, groups, 1, C, n].
        since_start: Decay from the start of the chunk, [N, groups, heads of a group, C, 1].
        updates: [N, groups, heads of a group, n, p].

    Returns:
        [N, groups, heads of a group, C, p].
    """
    parts = [x.split(list(steps)) for x in (read, since_start, updates)]
    state = torch.zeros_like(parts[2][0])
    outputs = []
    for c, decay, update in zip(*parts, strict=True):
        state = state[: c.size(0)]
        outputs.append((c @ state) * decay)
        state = state * decay[..., -1:, :] + update
    return torch.cat(outputs)
