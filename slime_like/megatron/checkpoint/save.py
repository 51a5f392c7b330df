"""Save checkpoints: plan, check disk space, write (synchronously or in the background), publish,
and remove old ones.

Every method is collective. An earlier checkpoint is not touched before its successor is complete on
disk under its final name.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from slime_like.checkpoints.files import FileRecord, remove_folder, sync_path, write_file
from slime_like.checkpoints.folders import (
    checkpoint_folder,
    clean_up,
    complete_steps,
    free_bytes,
    publish,
    remove_checkpoint,
    steps_to_remove,
    writing_folder,
)
from slime_like.checkpoints.manifest import total_bytes, write_manifest
from slime_like.checkpoints.state import TRAINER_FILE
from slime_like.distributed.collectives import from_rank_zero, gather
from slime_like.errors import RunError
from slime_like.megatron.checkpoint.fingerprint import fingerprint
from slime_like.megatron.checkpoint.networks import (
    SavedNetwork,
    layouts_of,
    optimizer_kind,
    optimizer_step,
    sharded_state,
)
from slime_like.megatron.checkpoint.rng_state import random_state_file, random_states
from slime_like.megatron.checkpoint.write import (
    NetworkPlan,
    Written,
    common_file,
    no_crc32,
    plan_network,
    write_items,
    write_network_metadata,
)
from slime_like.megatron.loss_scale import loss_scale_of
from slime_like.megatron.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

T = TypeVar("T")


logger = logging.getLogger(__name__)

IDENTITY = ("model", "tokenizer")  # keys of the trainer state that are copied to the manifest
WRITERS = 4  # threads per rank
MIB = 2**20
TRAINER_BYTES = 4 * MIB  # upper bound for trainer state and metadata


class SaveError(RunError):
    """A checkpoint could not be written; earlier ones are intact."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When and how checkpoints are saved, and which are kept."""

    keep_last: int | None = None  # see `folders.steps_to_remove`
    keep_every: int | None = None  # see `folders.steps_to_remove`
    asynchronous: bool = False  # write in the background while training continues
    # advice for a full disk, naming the flags of the program
    space_remedy: str = (
        "free some space, give another --save, or let --save-retain-last remove old checkpoints"
    )


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A published checkpoint."""

    step: int
    bytes: int
    seconds: float  # from start to publication
    blocked_s: float  # time that training was blocked
    removed: tuple[int, ...]  # steps of removed checkpoints
    free_bytes: int  # free disk space afterwards
    notes: tuple[str, ...] = ()  # problems


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    plans: dict[str, NetworkPlan]
    state: ShardedStateDict
    random: dict[str, bytes]  # random states by file name
    started: float
    blocked_s: float = 0.0
    written: Written = field(default_factory=Written)
    error: str | None = None
    thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class CheckpointSaver:
    """Writes checkpoints of one run to one folder."""

    def __init__(self, root: str | Path, policy: SavePolicy) -> None:
        """Removes leftovers of killed processes in `root`; `notes` lists them."""
        self.root = Path(root)
        self.policy = policy
        self._pending: _Pending | None = None
        self.notes: list[str] = from_rank_zero(lambda: clean_up(self.root))

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._pending is not None

    def save(
        self,
        step: int,
        networks: Mapping[str, SavedNetwork],
        state: ShardedStateDict,
        *,
        with_rng: bool,
    ) -> SaveReport | None:
        """Write checkpoint `step`; no other save may be pending.

        Args:
            networks: The layout of the first one is the run's.
            state: Trainer state, plain JSON; used on rank 0.

        Returns:
            The report, or None if the save continues in the background; see `poll` and `finish`.

        Raises:
            SaveError: On all ranks; earlier checkpoints are intact.
        """
        assert self._pending is None, "finish() the save before"
        started = time.perf_counter()
        folder = writing_folder(self.root, step)
        self._run_guarded(step, lambda: _make_folders(folder, networks))
        plans = {
            name: plan_network(
                sharded_state(network, is_loading=False),
                folder / name,
                rank=dist.get_rank(),
                detached=self.policy.asynchronous,
            )
            for name, network in networks.items()
        }
        self._check_space(step, gather(sum(plan.estimated_bytes() for plan in plans.values())))
        layouts = layouts_of(networks)
        fingerprints = {name: fingerprint(network) for name, network in networks.items()}
        description = describe_networks(networks, layouts, fingerprints, with_rng=with_rng)
        state = {**state, "step": step, **description}
        random = {
            random_state_file(dist.get_rank(), owner): random_states(layout)
            for owner, layout in layouts.items()
        }
        pending = _Pending(step, plans, state, random if with_rng else {}, started)
        self._pending = pending
        if not self.policy.asynchronous:
            _write_all(folder, pending)
            return self.finish()
        pending.thread = threading.Thread(
            target=_write_all, args=(folder, pending), name=f"checkpoint-{step}", daemon=True
        )
        pending.thread.start()
        pending.blocked_s = time.perf_counter() - started
        return None

    def poll(self) -> SaveReport | None:
        """Publish the pending checkpoint if all ranks have written their part. Raises SaveError if
        one could not."""
        if self._pending is None or not all(gather(self._pending.done)):
            return None
        return self.finish()

    def finish(self) -> SaveReport | None:
        """Wait for the pending checkpoint and publish it; None without one. Raises SaveError."""
        if (pending := self._pending) is None:
            return None
        waited = time.perf_counter()
        if pending.thread is not None:
            pending.thread.join()
        self._pending = None
        parts = gather((pending.error, pending.written))
        size = self._run_guarded(pending.step, lambda: self._publish(pending, parts))
        removed, notes, free = from_rank_zero(lambda: self._remove_old(pending.step))
        now = time.perf_counter()
        blocked = now - pending.started
        if pending.thread is not None:
            blocked = pending.blocked_s + now - waited
        return SaveReport(pending.step, size, now - pending.started, blocked, removed, free, notes)

    def _check_space(self, step: int, sizes: Sequence[int]) -> None:
        """Raise SaveError if the disk is too full. sizes: bytes of each rank's part."""
        needed = sum(sizes) + TRAINER_BYTES
        free = self._run_guarded(
            step, lambda: check_space(self.root, needed, self.policy.space_remedy)
        )
        logger.info(
            f"saving {checkpoint_folder(self.root, step)}: {needed / 1e9:.3f} GB, the disk has "
            f"{free / 1e9:.3f} GB free"
        )

    def _publish(self, pending: _Pending, parts: list[tuple[str | None, Written]]) -> int:
        """Complete and publish the checkpoint, on rank 0; returns its size in bytes."""
        records = self._complete(pending, parts)
        publish(self.root, pending.step)
        return total_bytes(records)

    def _complete(
        self, pending: _Pending, parts: list[tuple[str | None, Written]]
    ) -> dict[str, FileRecord]:
        """Write the files that belong to no single rank, the manifest last; on rank 0. Returns the
        records of all files."""
        for rank, (error, _) in enumerate(parts):
            if error is not None:
                raise OSError(f"rank {rank}: {error}")
        return complete_checkpoint(
            writing_folder(self.root, pending.step),
            pending.plans,
            [written for _, written in parts],
            pending.state,
        )

    def _remove_old(self, newest: int) -> tuple[tuple[int, ...], tuple[str, ...], int]:
        """Remove old checkpoints after `newest` is published, on rank 0. Returns (removed steps,
        notes, free bytes afterwards)."""
        removed = []
        notes = []
        steps = steps_to_remove(
            complete_steps(self.root),
            newest,
            keep_last=self.policy.keep_last,
            keep_every=self.policy.keep_every,
        )
        for step in steps:
            try:
                remove_checkpoint(self.root, step)
                removed.append(step)
            except OSError as error:
                notes.append(f"checkpoint {step} was not removed: {error}")
        return tuple(removed), tuple(notes), free_bytes(self.root)

    def _run_guarded(self, step: int, action: Callable[[], T]) -> T:
        """Run `action` on rank 0. An OSError removes the unfinished checkpoint and is raised as
        SaveError on all ranks."""

        def guarded() -> T:
            try:
                return action()
            except OSError:
                remove_folder(writing_folder(self.root, step))
                raise

        try:
            return from_rank_zero(guarded)
        except OSError as error:
            final = checkpoint_folder(self.root, step)
            raise SaveError(
                f"checkpoint {final} could not be written, earlier ones are whole: {error}"
            ) from error


def complete_checkpoint(
    folder: Path,
    plans: Mapping[str, NetworkPlan],
    parts: Sequence[Written],
    state: Mapping[str, object],
) -> dict[str, FileRecord]:
    """Write the files that belong to no single rank, the manifest last; on rank 0, after all ranks
    have written. Returns the records of all files.

    Args:
        folder: From `writing_folder`.
        plans: This rank's plan of each network.
        parts: What the ranks have written.
        state: Trainer state, plain JSON.
    """
    records: dict[str, FileRecord] = {}
    for written in parts:
        records |= written.records
    for name, plan in plans.items():
        assert plan.metadata is not None, "rank 0 coordinates"
        results = [written.results[name] for written in parts]
        files = write_network_metadata(folder / name, plan.metadata, results)
        records |= {f"{name}/{file}": record for file, record in files.items()}
    text = json.dumps(state, indent=1, allow_nan=False)
    records[TRAINER_FILE] = write_file(folder / TRAINER_FILE, text)
    for inner in (path for path in folder.iterdir() if path.is_dir()):
        sync_path(inner)
    write_manifest(folder, records, {name: state.get(name, {}) for name in IDENTITY})
    sync_path(folder)
    return records


def describe_networks(
    networks: Mapping[str, SavedNetwork],
    layouts: Mapping[str, ParallelLayout],
    fingerprints: Mapping[str, Mapping[str, str]],
    *,
    with_rng: bool,
) -> dict[str, object]:
    """Description of a checkpoint's networks for trainer.json, plain JSON. Collective.

    Args:
        fingerprints: Of this rank's part of each network.
    """
    described = {owner: layout.describe() for owner, layout in layouts.items()}
    return {
        "world_size": dist.get_world_size(),
        "has_rng": with_rng,
        "fingerprints": gather(fingerprints),
        "layout": next(iter(described.values())),
        "random_states": described if with_rng else {},
        "networks": {
            name: {
                "optimizer": optimizer_kind(n),
                "optimizer_step": optimizer_step(n),
                "scheduler": None if n.scheduler is None else n.scheduler.state_dict(),
                "layout": n.layout.describe(),
                "loss_scale": _loss_scale(n),
            }
            for name, n in networks.items()
        },
    }


def _loss_scale(network: SavedNetwork) -> list[float] | None:
    scale = None if network.optimizer is None else loss_scale_of(network.optimizer)
    return None if scale is None else scale.values


def _make_folders(folder: Path, networks: Mapping[str, SavedNetwork]) -> None:
    remove_folder(folder)
    for name in (*networks, "rng"):
        (folder / name).mkdir(parents=True)


def check_space(root: Path, needed: int, remedy: str, what: str = "it") -> int:
    """Free bytes of the disk. Raises OSError if they are fewer than `needed`."""
    if (free := free_bytes(root)) < needed:
        raise OSError(
            f"{what} needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free; "
            f"{remedy}"
        )
    return free


def _write_all(folder: Path, pending: _Pending) -> None:
    """Write this rank's files. Errors are stored for `finish`, since this may run in a thread."""
    try:
        written = pending.written
        with no_crc32(), ThreadPoolExecutor(WRITERS) as pool:
            jobs = {}
            for name, plan in pending.plans.items():
                path = folder / name
                jobs[name] = [pool.submit(write_items, path, f.name, f.items) for f in plan.files]
            for name, plan in pending.plans.items():
                if plan.common is not None:
                    written.records[f"{name}/{common_file()}"] = write_file(
                        folder / name / common_file(), plan.common
                    )
            for file_name, content in pending.random.items():
                written.records[file_name] = write_file(folder / file_name, content)
            for name, plan in pending.plans.items():
                written.results[name] = []
                for file, job in zip(plan.files, jobs[name], strict=True):
                    written.records[f"{name}/{file.name}"], results = job.result()
                    written.results[name] += results
    except Exception as error:
        pending.error = str(error) or type(error).__name__
    for plan in pending.plans.values():
        plan.files = []  # free the copies
