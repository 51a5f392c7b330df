"""Copy weights between networks with different layouts, shard by shard, matched by their names in
checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.megatron.checkpoint.networks import (
    SavedNetwork,
    sharded_state,
    sharded_tensors,
)
from slime_like.megatron.network import Network

Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes within the whole tensor


@torch.no_grad()
def copy_weights(source: Network, target: Network, wanted: Callable[[str], bool]) -> None:
    """Fill the checkpoint tensors of `target` whose name is `wanted` from `source`. Collective over
    all ranks.

    Each shard is broadcast once by the rank that would save it; a rank holds one shard at a time.
    Vocabulary padding that the source lacks becomes zero.
    """
    mine = {
        (t.key, region_of(t), t.dtype): t.data
        for t in _tensors(source)
        if is_main_replica(t.replica_id)
    }
    targets: dict[str, list[ShardedTensor]] = {}
    for tensor in _tensors(target):
        if wanted(tensor.key):
            targets.setdefault(tensor.key, []).append(tensor)
            tensor.data.zero_()  # a view of the network's own
    needed = {key for keys in gather(list(targets)) for key in keys}
    pieces = [[place for place in held if place[0] in needed] for held in gather(list(mine))]
    sent = {key for held in pieces for key, _, _ in held}
    assert needed <= sent, f"the other network has no {sorted(needed - sent)}"
    for rank, held in enumerate(pieces):
        for key, region, dtype in held:
            if rank == dist.get_rank():
                piece = mine[key, region, dtype].detach().contiguous().view(region[1])
            else:
                piece = torch.empty(region[1], dtype=dtype, device=target.device)
            dist.broadcast(piece, rank)
            for tensor in targets.get(key, ()):
                _paste(piece, region, tensor)


@torch.no_grad()
def copy_same_layout(source: Network, target: Network) -> None:
    """Copy every weight and buffer between networks with the same layout. No communication."""
    for theirs, ours in zip(source.chunks, target.chunks, strict=True):
        have = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
            tensor.copy_(have[name])


def region_of(tensor: ShardedTensor) -> Region:
    sizes = (1,) * (len(tensor.global_offset) - len(tensor.local_shape)) + tuple(
        tensor.local_shape
    )  # layers may be stacked in one tensor
    return tuple(tensor.global_offset), sizes


def _tensors(network: Network) -> list[ShardedTensor]:
    return list(
        sharded_tensors(
            sharded_state(SavedNetwork(network.chunks, None, None, network.layout), is_loading=True)
        )
    )


def _paste(piece: Tensor, region: Region, tensor: ShardedTensor) -> None:
    """Copy the overlap of `piece` into `tensor`."""
    offsets, sizes = region_of(tensor)
    low = [max(a, b) for a, b in zip(region[0], offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(*region, offsets, sizes, strict=True)]
    if all(a < b for a, b in zip(low, high, strict=True)):
        there = tuple(
            slice(a - start, b - start) for a, b, start in zip(low, high, region[0], strict=True)
        )
        here = tuple(
            slice(a - start, b - start) for a, b, start in zip(low, high, offsets, strict=True)
        )
        tensor.data.view(sizes)[here] = piece[there]
