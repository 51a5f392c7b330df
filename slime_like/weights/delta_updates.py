"""A folder of weight updates, shared by trainer and servers: changes, and regularly all weights.

    update-00000007.json    record of a complete update: its run, weight version and files
    update-00000007/        changes since update 6, and the SHA-256 of every changed tensor; of
                            every tensor in a full update
    full-00000007/          Hugging Face folder, in a full update

Updates are numbered consecutively. One without its .json is not read, because it may be incomplete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.checkpoints.files import read_json, replace_file, sync_path
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.weights.buckets import WeightBuckets, views
from slime_like.weights.delta import encode
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_save import save_hf, write_hf
from slime_like.weights.safetensors_writer import save_tensors

FILE_BYTES = 2**29  # size of a Hugging Face file, and of the changes collected for one file
THREADS = 4  # zlib, SHA-256 and torch release the GIL
SUMS = "sha256"  # metadata key of a file: tensor names -> hexadecimal digests
_NUMBER = re.compile(r"update-(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class Update:
    """A complete update."""

    run: str  # the trainer process that wrote it
    number: int
    version: int  # of the weights
    full: bool
    files: tuple[str, ...]
    nbytes: int  # size of the files with changes


def record_path(root: Path, number: int) -> Path:
    return root / f"update-{number:08d}.json"


def changes_path(root: Path, number: int) -> Path:
    return root / f"update-{number:08d}"


def full_path(root: Path, number: int) -> Path:
    return root / f"full-{number:08d}"


def updates_in(root: Path) -> list[int]:
    """Numbers of the complete updates, ascending."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in map(_NUMBER.fullmatch, names) if match)


def read_update(root: Path, number: int) -> Update:
    """Read an update's record. Raises FileNotFoundError if it does not exist, ValueError if the
    file is invalid."""
    path = record_path(root, number)
    try:
        update = Update(**read_json(path))
        return dataclasses.replace(update, files=tuple(update.files))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record of a weight update: {error}") from error


def remove_update(root: Path, number: int) -> None:
    """Remove an update. The record goes first, so that no reader starts on it."""
    with suppress(FileNotFoundError):
        record_path(root, number).unlink()
    for folder in (changes_path(root, number), full_path(root, number)):
        shutil.rmtree(folder, ignore_errors=True)


def sha256(flat: Tensor) -> str:
    """Hexadecimal SHA-256 of `flat`, [bytes] uint8 on the CPU."""
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()  # type: ignore[arg-type]


@dataclass(slots=True)
class SentTensor:
    """A tensor as last sent."""

    plan: TensorPlan
    flat: Tensor  # [bytes] uint8 on the CPU
    sum: str


# tensors last sent by this rank: folder -> name -> tensor
_sent: dict[str, dict[str, SentTensor]] = {}


def forget(root: str) -> None:
    """Free the memory of the weights last sent."""
    _sent.pop(root, None)


@dataclass(frozen=True, slots=True)
class Publication:
    """An update to be written by all ranks that have weights; broadcast from rank 0."""

    root: str  # folder of the updates
    source: str  # Hugging Face folder with config.json and tokenizer
    run: str
    number: int
    version: int
    fresh: bool  # do not encode against previously sent weights
    full: bool  # also write a Hugging Face folder
    buffer_bytes: int = FILE_BYTES  # changes that a rank collects before writing a file

    def assist(self, weights: WeightStream) -> None:
        self.write(weights)

    def write(self, weights: WeightStream) -> Update:
        """Write the update. Collective. If all ranks see the folder, every rank writes the weights
        that it has; otherwise rank 0 writes all. Raises ValueError or RunError on every rank."""
        changes = changes_path(Path(self.root), self.number)
        from_rank_zero(lambda: changes.mkdir(parents=True, exist_ok=True))
        shared = all(gather(changes.is_dir()))
        local = weights.own() if shared else weights.to_rank_zero()
        parts = gather(together(lambda: self._write(local)))
        if self.full:
            full = str(full_path(Path(self.root), self.number))
            save_hf(full, self._whole(), self.source, FILE_BYTES, every_rank=shared)
        return from_rank_zero(lambda: self._finish(list(chain(*parts))))

    def write_alone(self, weights: WeightBuckets) -> Update:
        """Write the update from this process alone, which has all of `weights`. Raises like
        `write`."""
        changes_path(Path(self.root), self.number).mkdir(parents=True, exist_ok=True)
        parts = self._write(weights)
        if self.full:
            full = full_path(Path(self.root), self.number)
            write_hf(full, self._whole(), Path(self.source), FILE_BYTES)
        return self._finish(parts)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights, from its memory."""
        for name, sent in _sent.get(self.root, {}).items():
            yield name, views(sent.flat, [sent.plan])[name]

    def _write(self, weights: WeightBuckets) -> list[tuple[str, int]]:
        """Write the changes; returns (file name, bytes). Always consumes the whole stream."""
        try:
            return self._write_changes(weights)
        except (OSError, RuntimeError) as error:
            raise RunError(f"writing a weight update to {self.root}: {error}") from error
        finally:
            for _ in weights:  # collective, so it must be consumed
                pass

    def _write_changes(self, weights: WeightBuckets) -> list[tuple[str, int]]:
        if self.fresh:
            forget(self.root)
        kept = _sent.setdefault(self.root, {})
        files = _ChangeFiles(changes_path(Path(self.root), self.number))
        with ThreadPoolExecutor(THREADS) as threads:
            for bucket in weights.buckets():
                flat = bucket.flat.to("cpu")
                parts = views(flat, [_as_bytes(tensor) for tensor in bucket.tensors])
                jobs = [(tensor, parts[tensor.name], kept) for tensor in bucket.tensors]
                for name, change, digest in threads.map(_take, jobs):
                    if change is not None:
                        files.add(name, change)
                    if change is not None or self.fresh:
                        files.sums[name] = digest
                if files.size > self.buffer_bytes:
                    files.flush()
        if self.full:
            files.sums = {name: sent.sum for name, sent in kept.items()}
        files.flush()
        return files.written

    def _finish(self, parts: list[tuple[str, int]]) -> Update:
        root = Path(self.root)
        names = tuple(name for name, _ in parts)
        sizes = sum(size for _, size in parts)
        done = Update(self.run, self.number, self.version, self.full, names, sizes)
        sync_path(changes_path(root, self.number))
        replace_file(record_path(root, self.number), json.dumps(dataclasses.asdict(done)))
        return done


def _as_bytes(tensor: TensorPlan) -> TensorPlan:
    return TensorPlan(tensor.name, (tensor.nbytes,), torch.uint8)


def _take(job: tuple[TensorPlan, Tensor, dict[str, SentTensor]]) -> tuple[str, bytes | None, str]:
    """Name, change and SHA-256 of a tensor; records it as last sent."""
    plan, flat, kept = job
    before = kept.get(plan.name)
    if before is None:
        kept[plan.name] = SentTensor(plan, flat.clone(), sha256(flat))
        return plan.name, None, kept[plan.name].sum
    if before.plan != plan:
        raise RuntimeError(f"{plan.name} is {plan}, and was {before.plan}")
    change = encode(before.flat, flat, plan.dtype.itemsize)
    if change is not None:
        before.flat.copy_(flat)
        before.sum = sha256(flat)
    return plan.name, change, before.sum


class _ChangeFiles:
    """Writes a rank's part of an update: safetensors files of compressed changes. sums: digests to
    store with the next file."""

    def __init__(self, folder: Path) -> None:
        self.written: list[tuple[str, int]] = []
        self.size = 0
        self.sums: dict[str, str] = {}
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def add(self, name: str, change: bytes) -> None:
        self._pending[name] = torch.frombuffer(bytearray(change), dtype=torch.uint8)
        self.size += len(change)

    def flush(self) -> None:
        if self._pending or self.sums:
            path = self._folder / f"{self._rank}-{len(self.written)}.safetensors"
            save_tensors(path, self._pending, {SUMS: json.dumps(self.sums)})
            sync_path(path)
            self.written.append((path.name, path.stat().st_size))
        self._pending = {}
        self.sums = {}
        self.size = 0
