"""Exchange of samples between the ranks that generated them and those that need them.

All ranks have the index of a rollout (`index.py`); tokens stay where they were generated
until the training ranks are known. Then they are sent once, as tensors (`deliver_samples`), in
messages with sizes known from the index. For user functions and files, complete samples are
gathered on rank 0 (`gather_on_rank_zero`).

Every function is collective over all ranks. group: a process group of all ranks for tensors in host
memory, if the default group is in use by another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.exchange import (
    Delivery,
    GroupTransport,
    Places,
    Sharing,
    Traffic,
    deliver,
)
from slime_like.samples.index import (
    ROW,
    AnySample,
    RemoteSample,
    count_versions,
    holder_of,
    remote_samples,
    rows_of,
)
from slime_like.samples.payload import (
    pack_payload,
    pack_texts,
    payload_size,
    unpack_payload,
    with_texts,
)
from slime_like.types import Sample

BUFFER_SIZE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Delivered:
    """Result of a delivery."""

    samples: dict[int, Sample]  # this rank's, by index
    traffic: Traffic  # bytes sent, received and held


def share_index(
    local: Sequence[Sample], holders: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[AnySample]:
    """Exchange metadata: returns all samples, local ones unchanged, others as `RemoteSample`.

    Args:
        local: This rank's samples, in order.
        holders: The rank that holds each sample, equal on all ranks.
    """
    rank, world = _rank_and_world()
    if world == 1:
        return list(local)
    counts = np.bincount(np.asarray(holders, dtype=np.int64), minlength=world)
    rows, versions = rows_of(local, rank)
    tables = [
        part.view(ROW)
        for part in _all_gather_varying(rows.view(np.uint8), counts * ROW.itemsize, group)
    ]
    several = np.array([count_versions(table) for table in tables])
    pairs = [
        part.view(np.int32).reshape(-1, 2)
        for part in _all_gather_varying(versions.reshape(-1).view(np.uint8), several * 8, group)
    ]
    by_rank: list[Iterator[AnySample]] = [
        iter(local) if other == rank else iter(remote_samples(tables[other], pairs[other]))
        for other in range(world)
    ]
    return [next(by_rank[holder]) for holder in holders]


def _all_gather_varying(
    local: np.ndarray, nbytes: np.ndarray, group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """All-gather of variable size. nbytes: bytes of each rank, equal on all ranks."""
    longest = int(nbytes.max())
    if not longest:
        return [np.empty(0, dtype=np.uint8) for _ in nbytes]
    if longest * len(nbytes) > 2 * int(nbytes.sum()):
        return _broadcast_each(local, nbytes, group)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: local.size] = torch.from_numpy(local)
    table = torch.empty(longest * len(nbytes), dtype=torch.uint8)
    dist.all_gather_into_tensor(table, padded, group=group)
    return [
        row[:size].numpy().copy()
        for row, size in zip(table.view(len(nbytes), -1), nbytes.tolist(), strict=True)
    ]


def _broadcast_each(
    local: np.ndarray, nbytes: np.ndarray, group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """As `_all_gather_varying`, by a broadcast from each rank, for very unequal sizes: an
    all-gather pads every row to the longest, so its size grows with the number of ranks."""
    parts = []
    for source, size in enumerate(nbytes.tolist()):
        part = local if source == dist.get_rank() else np.empty(size, dtype=np.uint8)
        buffer = torch.from_numpy(np.ascontiguousarray(part))
        if size:
            dist.broadcast(buffer, src=source, group=group)
        parts.append(buffer.numpy())
    return parts


def refresh_index(
    samples: Sequence[AnySample], group: dist.ProcessGroup | None = None
) -> list[AnySample]:
    """Exchange metadata again after the holders changed their samples."""
    rank = _rank_and_world()[0]
    return share_index(
        [s for s in samples if isinstance(s, Sample)], [holder_of(s, rank) for s in samples], group
    )


def with_branches(
    samples: Sequence[AnySample], group: dist.ProcessGroup | None = None
) -> list[AnySample]:
    """The sequences to train on: `all_sequences`.

    Raises:
        ValueError: on all ranks, for a sample with branches and rewards of tokens, or log-probs or
            a prompt of a teacher, which its branches have not.
    """
    for s in samples:
        for name in (
            ("token_rewards", "teacher_log_probs", "teacher_prompt") if s.num_branches else ()
        ):
            if s.has(name):
                raise ValueError(
                    f"sample {s.sample_id} is an episode of {s.num_branches + 1} sequences, and "
                    f"only the first has {name}; use one reward per episode, and no served teacher "
                    "or --opd-type self"
                )
    return all_sequences(samples, group)


def all_sequences(
    samples: Sequence[AnySample], group: dist.ProcessGroup | None = None
) -> list[AnySample]:
    """Each sample followed by its branches, which have its id, reward, metadata and status.
    Collective if a sample has any.

    Args:
        samples: Of a rollout, each complete on the rank that made it.
        group: Process group of all ranks, if the default group is in use at the same time.
    """
    counts = [s.num_branches for s in samples]
    if not any(counts):
        return list(samples)
    rank = _rank_and_world()[0]
    holders: list[int] = []
    local: list[Sample] = []
    for s, count in zip(samples, counts):
        holders += [holder_of(s, rank)] * (count + 1)
        if isinstance(s, Sample):
            local.append(replace(s, branches=()))
            local += [
                replace(branch, reward=s.reward, metadata=s.metadata, status=s.status)
                for branch in s.branches
            ]
    return share_index(local, holders, group)


def plan_delivery(
    samples: Sequence[AnySample], rank: int, sharings: Sequence[Sharing], buffer_size: int
) -> Delivery:
    """Plan which rank sends which sample to which rank; equal on all ranks."""
    holders = np.array([holder_of(s, rank) for s in samples], dtype=np.int64)
    nbytes = np.array([payload_size(s) for s in samples], dtype=np.int64)
    return Delivery(holders, nbytes, sharings, buffer_size=buffer_size)


def deliver_samples(
    samples: Sequence[AnySample],
    sharings: Sequence[Sharing],
    *,
    buffer_size: int = BUFFER_SIZE,
    group: dist.ProcessGroup | None = None,
) -> Delivered:
    """Deliver the samples that this rank trains on; received ones have no text and metadata.

    Args:
        samples: All samples of a rollout.
        sharings: Assignment of each trained network.
        buffer_size: Bytes in flight per rank.
    """
    rank = _rank_and_world()[0]
    delivery = plan_delivery(samples, rank, sharings, buffer_size)
    return _exchange(samples, delivery, rank, pack_payload, unpack_payload, group)


def gather_on_rank_zero(
    samples: Sequence[AnySample],
    *,
    buffer_size: int = BUFFER_SIZE,
    group: dist.ProcessGroup | None = None,
) -> list[AnySample]:
    """Gather complete samples, with text and metadata, on rank 0; other ranks keep what they
    have."""
    rank, world = _rank_and_world()
    holders = np.array([holder_of(s, rank) for s in samples], dtype=np.int64)
    if not holders.any():
        return list(samples)
    texts = {i: pack_texts(s) for i, s in enumerate(samples) if isinstance(s, Sample)}
    sizes = torch.zeros(len(samples), dtype=torch.int64)
    for place, packed in texts.items():
        sizes[place] = packed.numel()
    dist.all_reduce(sizes, group=group)
    tensors = np.array([payload_size(s) for s in samples], dtype=np.int64)
    to_zero = Sharing(np.arange(world).clip(max=1), np.zeros(len(samples), dtype=np.int64))
    delivery = Delivery(holders, tensors + sizes.numpy(), [to_zero], buffer_size=buffer_size)

    def unpack(remote: RemoteSample, packed: Tensor) -> Sample:
        size = payload_size(remote)
        return with_texts(unpack_payload(remote, packed[:size]), packed[size:])

    gathered = _exchange(
        samples,
        delivery,
        rank,
        lambda s: torch.cat([pack_payload(s), pack_texts(s)]),
        unpack,
        group,
    ).samples
    return [gathered.get(place, sample) for place, sample in enumerate(samples)]


def _exchange(
    samples: Sequence[AnySample],
    delivery: Delivery,
    rank: int,
    pack: Callable[[Sample], Tensor],
    unpack: Callable[[RemoteSample, Tensor], Sample],
    group: dist.ProcessGroup | None,
) -> Delivered:
    """Exchange: the samples that this rank needs, local and received ones."""
    needed = np.flatnonzero(delivery.wanted_by(rank)).tolist()
    samples_by_index: dict[int, Sample] = {}
    for place in needed:
        sample = samples[place]
        if isinstance(sample, Sample):
            samples_by_index[place] = sample

    def pack_at(place: int) -> Tensor:
        sample = samples[place]
        return pack(sample if isinstance(sample, Sample) else samples_by_index[place])

    def receive(place: int, payload: Tensor) -> None:
        remote = samples[place]
        assert isinstance(remote, RemoteSample)
        samples_by_index[place] = unpack(remote, payload)

    traffic = deliver(delivery, rank, pack_at, receive, GroupTransport(group))
    for place in needed:
        if place not in samples_by_index:  # its payload is empty, so no message was sent
            receive(place, torch.empty(0, dtype=torch.uint8))
    return Delivered(samples_by_index, traffic)


def make_sharing(part_of_rank: Sequence[int], places: Sequence[Sequence[int]]) -> Sharing:
    """The `Sharing` of an assignment.

    Args:
        part_of_rank: Data-parallel rank of every rank.
        places: Sample indices of every data-parallel rank.
    """
    parts: Places = np.zeros(sum(map(len, places)), dtype=np.int64)
    for part, of_rank in enumerate(places):
        parts[np.asarray(of_rank, dtype=np.int64)] = part
    return Sharing(np.asarray(part_of_rank, dtype=np.int64), parts)


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
