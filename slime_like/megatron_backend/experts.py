"""What the layout of the experts asks of the micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slime_like.megatron_backend.layout import ParallelLayout


def agreed_lengths(config: Any, layout: ParallelLayout, device: torch.device) -> Callable[[list[int]], list[int]] | None:
    """How ranks that share experts agree on the lengths of their micro-batches; None where these may differ.

    config: TransformerConfig. The allgather dispatcher gathers equally many tokens of every rank; alltoall sends how many there are.
    """
    shared = layout.ep_size * layout.etp_size > 1
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "allgather" or not shared:
        return None

    def longest(totals: list[int]) -> list[int]:
        lengths = torch.tensor(totals, dtype=torch.int64, device=device)
        for group in (layout.etp_group, layout.ep_group):
            dist.all_reduce(lengths, dist.ReduceOp.MAX, group=group)
        return [int(length) for length in lengths]

    return longest
