"""A node's own copy of the weights, as an ordinary Hugging Face folder that servers load: a full
copy from a folder of updates once, and from then on the changes alone, written in place."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_like.checkpoints.files import read_json, remove_folder, replace_file, sync_path
from slime_like.checkpoints.replacement import folder_to_replace
from slime_like.errors import RunError
from slime_like.weights.delta import apply
from slime_like.weights.delta_updates import (
    SUMS,
    THREADS,
    Update,
    changes_path,
    full_path,
    read_update,
    sha256,
    updates_in,
)
from slime_like.weights.safetensors_reader import StoredTensor, stored_tensors, weight_files

STATE = "slime_like_update.json"  # run and number of a copy; empty while the copy is incomplete


class _Damaged(Exception):
    """The copy does not have the expected tensors or bits."""


@dataclass(frozen=True, slots=True)
class _MappedTensor:
    """Bytes of a tensor in a copy."""

    flat: Tensor  # view of the memory-mapped file
    itemsize: int


class LocalCheckpoint:
    """A node's copy of the weights. Only one process writes it at a time, and only while no server
    loads it.

    Args:
        source: Folder of the updates.
        folder: The copy; created if missing.
    """

    def __init__(self, source: str | Path, folder: str | Path) -> None:
        self.source = Path(source)
        self.folder = Path(folder)

    def update_to(self, number: int) -> Update:
        """Bring the copy to update `number`: apply the changes since the copy's own update, or
        start from the newest full update if those are gone or there is no copy yet. An incomplete
        or damaged copy is rebuilt.

        Raises:
            RunError: The update is missing, or its files are damaged. The copy must not be used.
            ValueError: The folder holds something else.
        """
        try:
            return self._update_to(number)
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"update {number} of {self.source}: {error}") from error

    def _update_to(self, number: int) -> Update:
        update = read_update(self.source, number)
        chain = self._updates_to_apply(update)
        if chain is not None:
            try:
                self._apply(chain, {}, update)
                return update
            except (_Damaged, OSError, SafetensorError, ValueError):
                pass  # rebuild it, like an incomplete copy
        base = self._copy_full_update(update)
        try:
            sums = _sums(self.source, base)
            self._apply(self._between(base.number, update) or [], sums, update)
        except _Damaged as error:
            raise ValueError(f"is damaged: {error}") from error
        return update

    def _state(self) -> tuple[str, int] | None:
        """Run and number of the copy; None if it is incomplete."""
        try:
            state = read_json(self.folder / STATE)
            return str(state["run"]), int(state["number"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _is_copy(self) -> bool:
        return (self.folder / STATE).is_file()

    def _updates_to_apply(self, update: Update) -> list[Update] | None:
        """Updates to apply to the existing copy; None if they do not lead to `update`."""
        state = self._state()
        if state is None or state[0] != update.run or state[1] > update.number:
            return None
        return self._between(state[1], update)

    def _between(self, number: int, update: Update) -> list[Update] | None:
        """Updates after `number` up to `update`; None if one is missing or from another run."""
        try:
            updates = [read_update(self.source, n) for n in range(number + 1, update.number + 1)]
        except FileNotFoundError:
            return None
        return updates if all(item.run == update.run for item in updates) else None

    def _copy_full_update(self, update: Update) -> Update:
        """Replace the copy by the newest full update of the same run up to `update`."""
        for number in reversed(updates_in(self.source)):
            if number <= update.number:
                base = read_update(self.source, number)
                if base.full and base.run == update.run:
                    break
        else:
            raise ValueError("there is no full update before it")
        source = full_path(self.source, base.number)
        if self.folder.exists() and any(self.folder.iterdir()) and not self._is_copy():
            raise ValueError(f"{self.folder} is not a copy of weights; name another folder")
        folder = folder_to_replace(self.folder)
        temporary = folder.with_name(f".{folder.name}.new")  # no other process works here
        remove_folder(temporary)
        remove_folder(folder)  # a node's disk never holds two copies
        shutil.copytree(source, temporary)
        replace_file(temporary / STATE, "{}")
        temporary.rename(folder)
        sync_path(folder.parent)
        return base

    def _apply(self, chain: list[Update], sums: Mapping[str, str], update: Update) -> None:
        """Write the changes into the files, then check the hash of every changed tensor and of
        those in `sums`. The copy is marked incomplete until this succeeds."""
        replace_file(self.folder / STATE, "{}")
        expected = dict(sums)
        with ExitStack() as stack, ThreadPoolExecutor(THREADS) as threads:
            places = self._map_tensors(stack)
            for change_set in chain:
                expected |= _sums(self.source, change_set)
                for path in _files(self.source, change_set):
                    with safe_open(path, framework="pt") as file:
                        changes = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
                        for _ in threads.map(lambda pair: _apply_change(places, *pair), changes):
                            pass
            _verify(places, expected, threads)
        for path in weight_files(self.folder):
            sync_path(path)
        state = {"run": update.run, "number": update.number, "version": update.version}
        replace_file(self.folder / STATE, json.dumps(state))

    def _map_tensors(self, stack: ExitStack) -> dict[str, _MappedTensor]:
        """Memory-map all files; returns the tensors by name."""
        places: dict[str, _MappedTensor] = {}
        for path in weight_files(self.folder):
            size = path.stat().st_size
            mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            for name, stored in stored_tensors(descriptor).items():
                flat = mapped[stored.start : stored.start + stored.size]
                places[name] = _MappedTensor(flat, _itemsize(stored))
        return places


def _itemsize(stored: StoredTensor) -> int:
    elements = math.prod(stored.shape)
    return stored.size // elements if elements else 1


def _apply_change(places: Mapping[str, _MappedTensor], name: str, change: Tensor) -> None:
    place = places.get(name)
    if place is None:
        raise _Damaged(f"{name} is not in the copy")
    apply(change.numpy().tobytes(), place.flat, place.itemsize)


def _verify(
    places: Mapping[str, _MappedTensor], sums: Mapping[str, str], threads: ThreadPoolExecutor
) -> None:
    missing = sums.keys() - places.keys()
    digests = threads.map(lambda name: (name, sha256(places[name].flat)), sums.keys() - missing)
    different = sorted(missing | {name for name, digest in digests if digest != sums[name]})
    if different:
        raise _Damaged(
            f"{len(different)} tensors differ from the trainer's, {different[0]} among them"
        )


def _files(source: Path, update: Update) -> list[Path]:
    return [changes_path(source, update.number) / name for name in update.files]


def _sums(source: Path, update: Update) -> dict[str, str]:
    """SHA-256 by name of the tensors that the update changed; of all tensors for a full update."""
    sums: dict[str, str] = {}
    for path in _files(source, update):
        with safe_open(path, framework="pt") as file:
            sums |= json.loads((file.metadata() or {})[SUMS])
    return sums
