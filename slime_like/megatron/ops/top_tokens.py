"""The k most likely tokens from hidden states, without materialising the logits; see
fused_linear_logprob.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.ops.fused_linear_logprob import (
    DEFAULT_CHUNK_SIZE,
    Projection,
    columns_of_rank,
    rows_to_score,
)


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    *,
    k: int,
    vocab_size: int,
    rows: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """The k most likely tokens of each row. There is no temperature: it does not change their
    order.

    k: at most vocab_size. Other arguments as for `fused_linear_log_probs`.

    Returns:
        [N, k] int64 over the full vocabulary, most likely first; equal on all ranks of `tp_group`.
    """
    hidden = rows_to_score(hidden, rows, tp_group, sequence_parallel=sequence_parallel)
    start, num_columns = columns_of_rank(weight, vocab_size, tp_group)
    head = Projection(hidden, weight, None, 1.0, num_columns, chunk_size)
    # a rank may have fewer than k columns; entries that stay -inf are not selected in the end
    best = hidden.new_full((hidden.size(0), k), float("-inf"), dtype=head.dtype)
    tokens = torch.zeros(best.shape, dtype=torch.int64, device=hidden.device)
    workspace = head.workspace()
    for columns in head.column_blocks():
        for part in head.row_blocks():
            logits, _ = head.blocks(workspace, part, columns)
            values, indices = logits.topk(min(k, logits.size(1)), dim=1)
            best[part], tokens[part] = _keep_best(
                torch.cat([best[part], values], dim=1),
                torch.cat([tokens[part], indices + columns.start + start], dim=1),
                k,
            )
    if tp_group is not None and tp_group.size() > 1:
        best, tokens = _keep_best(_all_gather(best, tp_group), _all_gather(tokens, tp_group), k)
    return tokens


def _keep_best(values: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their tokens. values, tokens: [N, at least k]."""
    values, indices = values.topk(k, dim=1)
    return values, tokens.gather(1, indices)


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather [N, k] to [N, ranks * k]."""
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)
