"""In-memory checkpoints with a replica of each node's part on the next node
(--checkpoint-replicas), and their recovery after a restart.

Each rank writes its part to a folder in its node's memory, sends it to a rank of the next node, and
receives that of a rank of the previous node. A version is complete on every node before the
previous one is removed. After a restart the remaining nodes write the newest complete version to
--save, from where it is loaded as usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from slime_like.checkpoints.replicas import Held, copy_file, node_folder, run_id, whole_files
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

CHUNK_BYTES = 16 * 2**20  # size of a message between nodes


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of each node, ascending; equal on all ranks."""

    ranks: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def leads(self, rank: int) -> bool:
        """Whether `rank` is the first of its node and does the work that is done once per node."""
        return rank == self.ranks[self.of(rank)][0]

    def copies_to(self, rank: int) -> int | None:
        """The rank of the next node that receives the part of `rank`; None with a single node."""
        if len(self.ranks) == 1:
            return None
        node = self.of(rank)
        after = self.ranks[(node + 1) % len(self.ranks)]
        return after[self.ranks[node].index(rank) % len(after)]

    def copies_from(self, rank: int) -> list[int]:
        return [r for ranks in self.ranks for r in ranks if self.copies_to(r) == rank]


class ReplicaSaver(CheckpointSaver):
    """Saves checkpoints in the memory of the nodes. Every method is collective.

    Args:
        save: The run's checkpoint folder.
        base: Value of --checkpoint-replica-dir.
    """

    def __init__(self, save: str | Path, base: str | None) -> None:
        self.nodes, self.rank = Nodes(ranks_by_node()), dist.get_rank()
        self._leads = self.nodes.leads(self.rank)
        self.save_root = Path(save)
        name = from_rank_zero(lambda: run_id(self.save_root))
        roots = gather(self._on_each_node(lambda: node_folder(base, name, self.save_root)))
        self.root = roots[self.nodes.ranks[self.nodes.of(self.rank)][0]]
        self.policy = SavePolicy(space_remedy="--checkpoint-replica-dir names another folder")
        self._pending = None
        self.notes = []
        self._on_each_node(lambda: clean_up(self.root))

    def finish(self) -> SaveReport | None:
        if (pending := self._pending) is None:
            return None
        self._pending = None
        step, folder = pending.step, writing_folder(self.root, pending.step)
        parts = gather((pending.error, pending.written))
        of_ranks = [written.records for _, written in parts]
        names = self._or_fail(
            step, lambda: list(self._complete(pending, parts)) if self.rank == 0 else None
        )
        own = {name for records in of_ranks for name in records}
        shared = [name for name in [*(names or ()), MANIFEST] if name not in own]
        content = from_rank_zero(lambda: {name: (folder / name).read_bytes() for name in shared})
        self._exchange(folder, of_ranks)
        self._or_fail(step, lambda: self._check_part(folder, content, of_ranks))
        self._or_fail(step, lambda: publish(self.root, step))
        self._on_each_node(lambda: self._remove_all_but(step))
        seconds = time.perf_counter() - pending.started
        size = sum(total_bytes(records) for records in of_ranks)
        return SaveReport(step, size, seconds, seconds, (), 0)

    def drop(self) -> None:
        """Remove the checkpoints in memory, after an equal or newer one was written to --save."""
        self._on_each_node(lambda: self._remove_all_but(None))

    def restore(self) -> str:
        """Write the newest complete checkpoint in memory to --save, if it is newer than those
        there. Returns a message for the log."""
        newest = from_rank_zero(lambda: _newest_on_disk(self.save_root))
        steps = self._of_nodes(lambda: complete_steps(self.root))
        newer = sorted({step for node in steps for step in node if step > newest}, reverse=True)
        started = time.perf_counter()
        for step in newer:
            shares = shares_of(self._of_nodes(partial(_held, checkpoint_folder(self.root, step))))
            if shares is not None:
                size = self._bring(step, shares)
                return (
                    f"iter_{step:07d} restored from the memory of {sum(map(bool, shares))} node(s): {size / 1e9:.3f} GB in "
                    f"{time.perf_counter() - started:.2f} s; the newest in --save was of rollout {newest}"
                )
        if newer:
            return f"the nodes that are left hold no whole copy of rollout {newer[0]}: continuing from rollout {newest}"
        return "the nodes hold nothing in memory that --save has not"

    def _bring(self, step: int, shares: Sequence[Sequence[str]]) -> int:
        """Write checkpoint `step` from memory to --save; returns its size in bytes. shares: files
        that each node copies."""
        source, target = checkpoint_folder(self.root, step), writing_folder(self.save_root, step)
        mine = shares[self.nodes.of(self.rank)]
        has_all = next(number for number, names in enumerate(shares) if names)

        def copy() -> int:
            for name in mine:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(source / name, target / name)
            return total_bytes(read_manifest(source)) if mine else 0

        from_rank_zero(lambda: remove_folder(target))
        size = max(gather(self._on_each_node(copy) or 0))

        def seal() -> None:
            for inner in (path for path in target.iterdir() if path.is_dir()):
                sync_path(inner)
            copy_file(source / MANIFEST, target / MANIFEST)
            sync_path(target)
            publish(self.save_root, step)

        together(lambda: seal() if self.rank == self.nodes.ranks[has_all][0] else None)
        return size

    def _on_each_node(self, action: Callable[[], Any]) -> Any:
        """Run `action` once per node; returns its result on the leading rank, None on others. An
        error is raised on all ranks."""
        return together(lambda: action() if self._leads else None)

    def _of_nodes(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` once per node; returns the results of all nodes, on every rank."""
        found = gather(self._on_each_node(action))
        return [found[ranks[0]] for ranks in self.nodes.ranks]

    def _or_fail(self, step: int, action: Callable[[], Any]) -> Any:
        try:
            return self._on_each_node(action)
        except OSError as error:
            self._on_each_node(lambda: remove_folder(writing_folder(self.root, step)))
            raise SaveError(f"no copy of rollout {step} in memory: {error}") from error

    def _check_space(self, step: int, sizes: Sequence[int]) -> None:
        mine = self.nodes.of(self.rank)
        needed = TRAINER_BYTES + sum(
            sizes[rank]
            for node in {mine, (mine - 1) % len(self.nodes.ranks)}
            for rank in self.nodes.ranks[node]
        )
        self._or_fail(step, lambda: check_space(self.root, needed, self.policy.space_remedy))

    def _remove_all_but(self, step: int | None) -> None:
        for other in complete_steps(self.root):
            if other != step:
                remove_checkpoint(self.root, other)

    def _exchange(self, folder: Path, of_ranks: Sequence[Mapping[str, FileRecord]]) -> None:
        """Send this rank's files to the next node and receive those of the previous one. Read and
        write errors are ignored here, since the other ranks expect every message; `_check_part`
        detects them."""
        to, sources = self.nodes.copies_to(self.rank), self.nodes.copies_from(self.rank)
        outgoing = _chunks_of(of_ranks[self.rank]) if to is not None else []
        incoming = {rank: _chunks_of(of_ranks[rank]) for rank in sources}
        for place in range(max(map(len, [outgoing, *incoming.values()]))):
            work = []
            if place < len(outgoing):
                work.append(dist.isend(_read(folder, outgoing[place]), to))
            arriving = []
            for rank, chunks in incoming.items():
                if place < len(chunks):
                    arriving.append(
                        (chunks[place], torch.empty(chunks[place].size, dtype=torch.uint8))
                    )
                    work.append(dist.irecv(arriving[-1][1], rank))
            for each in work:
                assert each is not None
                each.wait()
            for chunk, buffer in arriving:
                _write(folder, chunk, buffer)

    def _check_part(
        self,
        folder: Path,
        content: Mapping[str, bytes],
        of_ranks: Sequence[Mapping[str, FileRecord]],
    ) -> None:
        """Verify the files received from the previous node, and write the files that belong to no
        rank."""
        mine = self.nodes.ranks[self.nodes.of(self.rank)]
        sources = {source for rank in mine for source in self.nodes.copies_from(rank)}
        records = {name: record for source in sources for name, record in of_ranks[source].items()}
        if wrong := damaged_files(folder, records, records, threads=len(mine)):
            raise OSError(f"node {self.nodes.of(self.rank)}: {describe(wrong)}")
        for name, text in content.items() if self.rank != 0 else ():
            write_file(folder / name, text)


def shares_of(held: Sequence[Held | None]) -> list[list[str]] | None:
    """Assign each file of a checkpoint to one of the nodes that hold it, starting with the files
    held by the fewest nodes.

    Args:
        held: What each node holds.

    Returns:
        File names by node, or None if the nodes together hold no complete checkpoint.
    """
    for manifest in {one.manifest for one in held if one is not None}:
        nodes = [one if one is not None and one.manifest == manifest else None for one in held]
        holders: dict[str, list[int]] = {}
        for number, one in enumerate(nodes):
            for name in one.files if one is not None else ():
                holders.setdefault(name, []).append(number)
        if len(holders) < max(one.of for one in nodes if one is not None):
            continue
        shares: list[list[str]] = [[] for _ in held]
        for name in sorted(holders, key=lambda name: (len(holders[name]), name)):
            numbers = holders[name]
            min((shares[number] for number in numbers), key=len).append(name)
        return shares
    return None


def _held(folder: Path) -> Held | None:
    try:
        return whole_files(folder)
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
    return [
        _Chunk(name, start, min(CHUNK_BYTES, record.size - start))
        for name, record in sorted(records.items())
        for start in range(0, record.size, CHUNK_BYTES)
    ]


def _read(folder: Path, chunk: _Chunk) -> Tensor:
    found = torch.zeros(chunk.size, dtype=torch.uint8)
    with suppress(OSError), open(folder / chunk.name, "rb") as file:
        file.seek(chunk.start)
        file.readinto(found.numpy().data)
    return found


def _write(folder: Path, chunk: _Chunk, buffer: Tensor) -> None:
    with suppress(OSError), open(folder / chunk.name, "ab" if chunk.start else "wb") as file:
        file.write(buffer.numpy().data)
