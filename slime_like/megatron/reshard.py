"""Copy weights between networks with different layouts, shard by shard, matched by their names in
checkpoints."""

from __future__ import annotations

import itertools
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
from slime_like.megatron.checkpoint.tensors import Region, overlap
from slime_like.megatron.network import Network


@torch.no_grad()
def copy_weights(source: Network, target: Network, include: Callable[[str], bool]) -> None:
    """Copy weights to `target`, for checkpoint names that `include` accepts. Collective over all
    ranks.

    Each shard is broadcast once by the rank that would save it; a rank holds one shard at a time.
    Vocabulary padding that the source lacks becomes zero.
    """
    shards = {
        (t.key, region_of(t), t.dtype): t.data
        for t in _tensors(source)
        if is_main_replica(t.replica_id)
    }
    targets: dict[str, list[ShardedTensor]] = {}
    for tensor in _tensors(target):
        if include(tensor.key):
            targets.setdefault(tensor.key, []).append(tensor)
            tensor.data.zero_()  # a view of the network's own
    needed = set(itertools.chain(*gather(list(targets))))
    held = gather(list(shards))
    missing = needed.difference(key for keys in held for key, _, _ in keys)
    assert not missing, f"the other network has no {sorted(missing)}"
    for rank, keys in enumerate(held):
        for key, region, dtype in keys:
            if key not in needed:
                continue
            if rank == dist.get_rank():
                shard = shards[key, region, dtype].detach().contiguous().view(region[1])
            else:
                shard = torch.empty(region[1], dtype=dtype, device=target.device)
            dist.broadcast(shard, rank)
            for tensor in targets.get(key, ()):
                _copy_overlap(shard, region, tensor)


@torch.no_grad()
def copy_same_layout(
    source: Network, target: Network, include: Callable[[str], bool] = lambda name: True
) -> None:
    """Copy weights and buffers to a network with the same layout. No communication."""
    for source_chunk, chunk in zip(source.chunks, target.chunks, strict=True):
        weights = dict((*source_chunk.named_parameters(), *source_chunk.named_buffers()))
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if include(name):
                tensor.copy_(weights[name])


def region_of(tensor: ShardedTensor) -> Region:
    # layers may be stacked in one tensor
    stacked = len(tensor.global_offset) - len(tensor.local_shape)
    return tuple(tensor.global_offset), (1,) * stacked + tuple(tensor.local_shape)


def _tensors(network: Network) -> list[ShardedTensor]:
    saved = SavedNetwork(network.chunks, None, None, network.layout)
    return list(sharded_tensors(sharded_state(saved, is_loading=True)))


def _copy_overlap(shard: Tensor, region: Region, tensor: ShardedTensor) -> None:
    """Copy the part of `shard` that lies in `tensor`."""
    own_region = region_of(tensor)
    if (slices := overlap(region, own_region)) is not None:
        tensor.data.view(own_region[1])[slices[1]] = shard[slices[0]]
