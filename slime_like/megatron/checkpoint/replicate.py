"""In-memory checkpoints with a replica of each node's part on the next node
(--checkpoint-replicas), and their recovery after a restart.

Each rank writes its part to a folder in its node's memory, sends it to a rank of the next node, and
receives that of a rank of the previous node. A version is complete on every node before the
previous one is removed. After a restart the remaining nodes write the newest complete version to
--save, from where it is loaded as usual.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.checkpoints.files import FileRecord, remove_folder, sync_path, write_file
from slime_like.checkpoints.folders import (
    checkpoint_folder,
    clean_up,
    complete_steps,
    is_checkpoint_root,
    newest_step,
    publish,
    remove_checkpoint,
    writing_folder,
)
from slime_like.checkpoints.manifest import (
    MANIFEST,
    damaged_files,
    describe,
    read_manifest,
    total_bytes,
)
from slime_like.checkpoints.replicas import NodeFiles, copy_file, intact_files, node_folder, run_id
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.distributed.nodes import ranks_by_node
from slime_like.megatron.checkpoint.save import (
    TRAINER_BYTES,
    CheckpointSaver,
    SaveError,
    SavePolicy,
    SaveReport,
    check_space,
)

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20  # size of a message between nodes


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of each node, ascending; equal on all ranks."""

    ranks: tuple[tuple[int, ...], ...]

    def node_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def is_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of its node and does the work that is done once per node."""
        return rank == self.ranks[self.node_of(rank)][0]

    def target_of(self, rank: int) -> int | None:
        """The rank of the next node that receives the part of `rank`; None with a single node."""
        if len(self.ranks) == 1:
            return None
        node = self.node_of(rank)
        after = self.ranks[(node + 1) % len(self.ranks)]
        return after[self.ranks[node].index(rank) % len(after)]

    def sources_of(self, rank: int) -> list[int]:
        return [r for r in itertools.chain(*self.ranks) if self.target_of(r) == rank]


class ReplicaSaver(CheckpointSaver):
    """Saves checkpoints in the memory of the nodes. Every method is collective.

    Args:
        save: The run's checkpoint folder.
        base: Value of --checkpoint-replica-dir.
    """

    def __init__(self, save: str | Path, base: str | None) -> None:
        self.nodes = Nodes(ranks_by_node())
        self.rank = dist.get_rank()
        self._is_leader = self.nodes.is_leader(self.rank)
        self.save_root = Path(save)
        name = from_rank_zero(lambda: run_id(self.save_root))
        roots = self._from_nodes(lambda: node_folder(base, name, self.save_root))
        self.root = roots[self.nodes.node_of(self.rank)]
        self.policy = SavePolicy(space_remedy="--checkpoint-replica-dir names another folder")
        self._pending = None
        self.notes = []
        self._on_each_node(lambda: clean_up(self.root))

    def finish(self) -> SaveReport | None:
        if (pending := self._pending) is None:
            return None
        self._pending = None
        step = pending.step
        folder = writing_folder(self.root, pending.step)
        parts = gather((pending.error, pending.written))
        records_by_rank = [written.records for _, written in parts]
        names = self._run_guarded(
            step, lambda: list(self._complete(pending, parts)) if self.rank == 0 else None
        )
        written = set(itertools.chain(*records_by_rank))
        shared = [name for name in [*(names or ()), MANIFEST] if name not in written]
        content = from_rank_zero(lambda: {name: (folder / name).read_bytes() for name in shared})
        self._exchange_files(folder, records_by_rank)
        self._run_guarded(step, lambda: self._check_part(folder, content, records_by_rank))
        self._run_guarded(step, lambda: publish(self.root, step))
        self._on_each_node(lambda: self._remove_all_but(step))
        seconds = time.perf_counter() - pending.started
        size = sum(total_bytes(records) for records in records_by_rank)
        return SaveReport(step, size, seconds, seconds, (), 0)

    def drop(self) -> None:
        """Remove the checkpoints in memory, after an equal or newer one was written to --save."""
        self._on_each_node(lambda: self._remove_all_but(None))

    def restore(self) -> str:
        """Write the newest complete checkpoint in memory to --save, if it is newer than those
        there. Returns a message for the log."""
        newest = from_rank_zero(lambda: _newest_on_disk(self.save_root))
        steps = set(itertools.chain(*self._from_nodes(lambda: complete_steps(self.root))))
        newer = sorted((step for step in steps if step > newest), reverse=True)
        started = time.perf_counter()
        for step in newer:
            folder = checkpoint_folder(self.root, step)
            shares = assign_files(self._from_nodes(partial(_node_files, folder)))
            if shares is not None:
                size = self._write_back(step, shares)
                return (
                    f"iter_{step:07d} restored from the memory of {sum(map(bool, shares))} node(s):"
                    f" {size / 1e9:.3f} GB in {time.perf_counter() - started:.2f} s; the newest in "
                    f"--save was of rollout {newest}"
                )
        if newer:
            return (
                f"the remaining nodes have no complete copy of rollout {newer[0]}: continuing from "
                f"rollout {newest}"
            )
        return "the nodes have nothing in memory that is not in --save"

    def _write_back(self, step: int, shares: Sequence[Sequence[str]]) -> int:
        """Write checkpoint `step` from memory to --save; returns its size in bytes. shares: files
        that each node copies."""
        source = checkpoint_folder(self.root, step)
        target = writing_folder(self.save_root, step)
        names = shares[self.nodes.node_of(self.rank)]
        first_node = next(node for node, names in enumerate(shares) if names)

        def copy() -> int:
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(source / name, target / name)
            return total_bytes(read_manifest(source)) if names else 0

        from_rank_zero(lambda: remove_folder(target))
        size = max(gather(self._on_each_node(copy) or 0))

        def publish_copy() -> None:
            for inner in (path for path in target.iterdir() if path.is_dir()):
                sync_path(inner)
            copy_file(source / MANIFEST, target / MANIFEST)
            sync_path(target)
            publish(self.save_root, step)

        publishes = self.rank == self.nodes.ranks[first_node][0]
        together(lambda: publish_copy() if publishes else None)
        return size

    def _on_each_node(self, action: Callable[[], T]) -> T | None:
        """Run `action` once per node; returns its result on the leading rank, None on others. An
        error is raised on all ranks."""
        return together(lambda: action() if self._is_leader else None)

    def _from_nodes(self, action: Callable[[], T]) -> list[T]:
        """Run `action` once per node; returns the results of all nodes, on every rank."""
        results = gather(self._on_each_node(action))
        return [cast(T, results[ranks[0]]) for ranks in self.nodes.ranks]

    def _run_guarded(self, step: int, action: Callable[[], T]) -> T | None:  # type: ignore[override]
        try:
            return self._on_each_node(action)
        except OSError as error:
            self._on_each_node(lambda: remove_folder(writing_folder(self.root, step)))
            raise SaveError(f"no copy of rollout {step} in memory: {error}") from error

    def _check_space(self, step: int, sizes: Sequence[int]) -> None:
        node = self.nodes.node_of(self.rank)
        ranks = self.nodes.ranks
        stored = itertools.chain(*(ranks[n] for n in {node, (node - 1) % len(ranks)}))
        needed = TRAINER_BYTES + sum(sizes[rank] for rank in stored)
        self._run_guarded(step, lambda: check_space(self.root, needed, self.policy.space_remedy))

    def _remove_all_but(self, step: int | None) -> None:
        for other in complete_steps(self.root):
            if other != step:
                remove_checkpoint(self.root, other)

    def _exchange_files(
        self, folder: Path, records_by_rank: Sequence[Mapping[str, FileRecord]]
    ) -> None:
        """Send this rank's files to the next node and receive those of the previous one. Read and
        write errors are ignored here, since the other ranks expect every message; `_check_part`
        detects them."""
        target = self.nodes.target_of(self.rank)
        sources = self.nodes.sources_of(self.rank)
        outgoing = _chunks_of(records_by_rank[self.rank]) if target is not None else []
        incoming = {rank: _chunks_of(records_by_rank[rank]) for rank in sources}
        for index in range(max(map(len, [outgoing, *incoming.values()]))):
            requests = []
            if index < len(outgoing):
                requests.append(dist.isend(_read(folder, outgoing[index]), target))
            received = []
            for rank, chunks in incoming.items():
                if index < len(chunks):
                    buffer = torch.empty(chunks[index].size, dtype=torch.uint8)
                    received.append((chunks[index], buffer))
                    requests.append(dist.irecv(buffer, rank))
            for request in requests:
                assert request is not None
                request.wait()
            for chunk, buffer in received:
                _write(folder, chunk, buffer)

    def _check_part(
        self,
        folder: Path,
        content: Mapping[str, bytes],
        records_by_rank: Sequence[Mapping[str, FileRecord]],
    ) -> None:
        """Verify the files received from the previous node, and write the files that belong to no
        rank."""
        node = self.nodes.node_of(self.rank)
        records: dict[str, FileRecord] = {}
        for rank in self.nodes.ranks[node]:
            for source in self.nodes.sources_of(rank):
                records |= records_by_rank[source]
        if damaged := damaged_files(folder, records, records, threads=len(self.nodes.ranks[node])):
            raise OSError(f"node {node}: {describe(damaged)}")
        if self.rank != 0:
            for name, data in content.items():
                write_file(folder / name, data)


def assign_files(nodes: Sequence[NodeFiles | None]) -> list[list[str]] | None:
    """Assign each file of a checkpoint to one of the nodes that hold it, starting with the files
    held by the fewest nodes.

    Args:
        nodes: The files of each node.

    Returns:
        File names by node, or None if the nodes together hold no complete checkpoint.
    """
    for manifest, total in sorted({(n.manifest, n.total) for n in nodes if n is not None}):
        holders: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            if node is not None and node.manifest == manifest:
                for name in node.files:
                    holders.setdefault(name, []).append(index)
        if len(holders) < total:
            continue
        shares: list[list[str]] = [[] for _ in nodes]
        for name in sorted(holders, key=lambda name: (len(holders[name]), name)):
            min((shares[index] for index in holders[name]), key=len).append(name)
        return shares
    return None


def _node_files(folder: Path) -> NodeFiles | None:
    try:
        return intact_files(folder)
    except (OSError, ValueError):  # no manifest, or a damaged one
        return None


def _newest_on_disk(root: Path) -> int:
    try:
        return newest_step(root)[0] if is_checkpoint_root(root) else 0
    except ValueError:  # reported when it is loaded
        return 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A piece of a file."""

    name: str
    start: int
    size: int


def _chunks_of(records: Mapping[str, FileRecord]) -> list[_Chunk]:
    chunks = []
    for name, record in sorted(records.items()):
        for start in range(0, record.size, CHUNK_BYTES):
            chunks.append(_Chunk(name, start, min(CHUNK_BYTES, record.size - start)))
    return chunks


def _read(folder: Path, chunk: _Chunk) -> Tensor:
    buffer = torch.zeros(chunk.size, dtype=torch.uint8)
    with suppress(OSError), open(folder / chunk.name, "rb") as file:
        file.seek(chunk.start)
        file.readinto(buffer.numpy().data)
    return buffer


def _write(folder: Path, chunk: _Chunk, buffer: Tensor) -> None:
    with suppress(OSError), open(folder / chunk.name, "ab" if chunk.start else "wb") as file:
        file.write(buffer.numpy().data)
