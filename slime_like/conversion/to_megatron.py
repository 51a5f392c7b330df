"""Convert a Hugging Face folder to a weights-only checkpoint for --load, --ref-load and
--critic-load, one parameter at a time.

Every rank of the layout writes the shards that it would own in a run, in files of bounded size. A
complete file has a marker next to it, and is reused if the conversion of the same model in the same
layout is repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from slime_like import __version__
from slime_like.checkpoints.files import (
    FileRecord,
    hash_file,
    remove_folder,
    replace_file,
    sync_path,
    write_file,
)
from slime_like.checkpoints.folders import (
    checkpoint_folder,
    complete_steps,
    free_bytes,
    publish,
    writing_folder,
)
from slime_like.checkpoints.manifest import total_bytes, write_manifest
from slime_like.checkpoints.state import TRAINER_FILE
from slime_like.config import ConfigError, Problem
from slime_like.conversion.meta_model import Blueprint
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.megatron.checkpoint.save import MIB
from slime_like.megatron.checkpoint.write import (
    FilePlan,
    common_file,
    no_crc32,
    plan_network,
    write_file_plan,
    write_network_metadata,
)
from slime_like.weights.hf_import import LoadPlan, plan_loading
from slime_like.weights.safetensors_reader import WeightFiles, weight_files

if TYPE_CHECKING:
    from slime_like.megatron.checkpoint.write import NetworkPlan


STEP = 0
FILE_BYTES = 2**30
NOTE = ".done.json"
Advance = Callable[[int], None]  # called with the bytes of every converted tensor


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion, summed over ranks. kept: complete files reused from an interrupted
    conversion."""

    folder: Path
    bytes: int
    files: int
    kept: int


def convert_to_megatron(
    blueprint: Blueprint,
    source: str,
    root: str,
    *,
    network: str,
    workers: int,
    file_bytes: int = FILE_BYTES,
    advance: Advance = lambda size: None,
) -> Converted:
    """Write the model in `source` as checkpoint 0 in `root`, under the name `network` ("policy" or
    "critic"). Collective; each of `workers` threads holds one parameter of this rank.

    Raises:
        ValueError: On every rank: the model's files do not match its config.json.
        ConfigError: On every rank: `root` already has checkpoints.
        RunError: On every rank: writing failed.
    """
    folder = writing_folder(root, STEP)
    from_rank_zero(lambda: _check_root(Path(root)))
    with together(lambda: WeightFiles(source)) as files:
        loading = together(
            lambda: plan_loading(
                blueprint.parameters, files, source, blueprint.chunks[0], hf=blueprint.hf, gpt=blueprint.gpt, layout=blueprint.layout,
                value_head=blueprint.value_head,
            )
        )  # fmt: skip
        plan_folder = folder / network
        together(lambda: plan_folder.mkdir(parents=True, exist_ok=True))
        plan = plan_network(blueprint.state, plan_folder, rank=dist.get_rank(), detached=False)
        job = _Job(
            blueprint,
            files,
            loading,
            plan_folder,
            _identity(blueprint, source, file_bytes),
            advance,
        )
        plans = job.split([item for file in plan.files for item in file.items], file_bytes)
        needed = sum(
            gather(sum(p.estimated_bytes() for p in plans if not (plan_folder / p.name).exists()))
        )
        from_rank_zero(lambda: _check_space(root, needed))
        try:
            written = together(lambda: job.write_all(plans, workers))
        except OSError as error:
            raise RunError(
                f"{folder} could not be written: {error}; what is whole is kept, run the same command again"
            ) from error
    parts = gather(written)

    size = from_rank_zero(
        lambda: _complete(blueprint, source, root, network=network, plan=plan, parts=parts)
    )
    return Converted(
        checkpoint_folder(root, STEP),
        size,
        sum(map(len, parts)),
        sum(kept for part in parts for *_, kept in part),
    )


Written = tuple[str, FileRecord, list[WriteResult], bool]  # last: reused file


def _complete(
    blueprint: Blueprint,
    source: str,
    root: str,
    *,
    network: str,
    plan: NetworkPlan,
    parts: Sequence[Sequence[Written]],
) -> int:
    """Rank 0, after all tensors are written: write metadata, trainer state and manifest, and
    publish the checkpoint. Returns its size in bytes."""
    folder = writing_folder(root, STEP)
    plan_folder = folder / network
    records = {f"{network}/{name}": record for part in parts for name, record, _, _ in part}
    assert plan.common is not None and plan.metadata is not None, "rank 0 coordinates"
    records[f"{network}/{common_file()}"] = write_file(plan_folder / common_file(), plan.common)
    results = [[result for _, _, results, _ in part for result in results] for part in parts]
    more = write_network_metadata(plan_folder, plan.metadata, results)
    records |= {f"{network}/{name}": record for name, record in more.items()}
    state = _trainer_state(blueprint, source, network)
    records[TRAINER_FILE] = write_file(
        folder / TRAINER_FILE, json.dumps(state, indent=1, allow_nan=False)
    )
    for path in plan_folder.iterdir():
        if (
            f"{network}/{path.name}" not in records
        ):  # markers, and files of an interrupted conversion of another model
            path.unlink()
    sync_path(plan_folder)
    write_manifest(folder, records, {"model": state["model"]})
    sync_path(folder)
    publish(root, STEP)
    return total_bytes(records)


@dataclass(frozen=True)
class _Job:
    """One rank's part of a conversion."""

    blueprint: Blueprint
    files: WeightFiles
    loading: LoadPlan
    folder: Path
    identity: str
    advance: Advance

    def split(self, items: Sequence[tuple[Any, Any]], file_bytes: int) -> list[FilePlan]:
        """Split write items into files of about `file_bytes`, keeping the shards of a parameter
        together."""
        order = {place: number for number, place in enumerate(self._places())}
        items = sorted(items, key=lambda item: order.get(_place(item[0].index), -1))
        plans: list[FilePlan] = []
        size = file_bytes
        for item, data in items:
            if size >= file_bytes:
                plans.append(FilePlan(f"__{dist.get_rank()}_{len(plans)}.distcp", []))
                size = 0
            plans[-1].items.append((item, data))
            size += data.numel() * data.element_size() if isinstance(data, Tensor) else 0
        return plans

    def _places(self) -> dict[tuple[str, tuple[int, ...]], tuple[str, int]]:
        """(key, global offset) in the checkpoint -> (parameter, index of its shard)."""
        return {
            (piece.key, tuple(piece.global_offset)): (name, number)
            for name in self.blueprint.parameters
            for number, piece in enumerate(self.blueprint.pieces(name))
        }

    def write_all(self, plans: Sequence[FilePlan], workers: int) -> list[Written]:
        places = self._places()
        with no_crc32(), ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda plan: self._write(plan, places), plans))

    def _write(
        self, plan: FilePlan, places: dict[tuple[str, tuple[int, ...]], tuple[str, int]]
    ) -> Written:
        if (kept := self._kept(plan)) is not None:
            self.advance(
                sum(
                    data.numel() * data.element_size()
                    for _, data in plan.items
                    if isinstance(data, Tensor)
                )
            )
            return kept
        record, results = write_file_plan(
            self.folder,
            FilePlan(plan.name, _Filled(self._filled(plan, places))),  # type: ignore[arg-type]
        )
        entries = [
            (
                r.index.fqn,
                None if r.index.offset is None else list(r.index.offset),
                r.index.index,
                r.storage_data.offset,
                r.size_in_bytes,
            )
            for r in results
        ]
        note = {"identity": self.identity, **asdict(record), "items": entries}
        replace_file(self.folder / (plan.name + NOTE), json.dumps(note))
        return plan.name, record, results, False

    def _kept(self, plan: FilePlan) -> Written | None:
        """The file, if it is complete and was written by a conversion of the same model in the same
        layout."""
        try:
            note = json.loads((self.folder / (plan.name + NOTE)).read_text())
            record = FileRecord(note["size"], note["sha256"])
            if note["identity"] != self.identity or hash_file(self.folder / plan.name) != record:
                return None
            results = [
                WriteResult(
                    MetadataIndex(fqn, None if offset is None else torch.Size(offset), index),
                    length,
                    _StorageInfo(plan.name, start, length),
                )
                for fqn, offset, index, start, length in note["items"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (
            (plan.name, record, results, True)
            if [r.index for r in results] == [item.index for item, _ in plan.items]
            else None
        )

    def _filled(
        self, plan: FilePlan, places: dict[tuple[str, tuple[int, ...]], tuple[str, int]]
    ) -> Iterator[tuple[object, object]]:
        """Add data to the write items: objects unchanged, tensors read from the model's files one
        parameter at a time."""
        at: str | None = None
        pieces: list[Tensor] = []
        for item, data in plan.items:
            if not isinstance(data, Tensor):
                yield item, data
                continue
            name, number = places[_place(item.index)]
            if name != at:
                pieces.clear()  # freed before the next parameter is read
                shell = self.blueprint.parameters[name]
                shard = torch.empty(shell.shape, dtype=shell.dtype)
                self.loading.fill(name, shard, self.files)
                at, pieces = name, [piece.data for piece in self.blueprint.pieces(name, shard)]
            piece = pieces[number].view(data.shape)
            # torch.save would write a view's full storage
            yield item, piece.clone() if piece.untyped_storage().nbytes() != piece.nbytes else piece
            self.advance(piece.nbytes)


class _Filled:
    """Write items that are filled lazily."""

    def __init__(self, items: Iterator[tuple[object, object]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._items


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _check_root(root: Path) -> None:
    if steps := complete_steps(root):
        raise ConfigError(
            [
                Problem(
                    "--save",
                    root,
                    f"has checkpoints already (steps {', '.join(map(str, steps))}); name another folder",
                )
            ]
        )
    if root.exists() and not root.is_dir():
        raise ConfigError([Problem("--save", root, "is a file; name a folder")])


def _check_space(root: str, needed: int) -> None:
    if (free := free_bytes(root)) < needed + 4 * MIB:
        raise OSError(
            f"--save {root}: needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free; name a folder on another disk"
        )


def _identity(blueprint: Blueprint, source: str, file_bytes: int) -> str:
    """Fingerprint of everything except its name that determines the bytes of a file."""
    stats = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in weight_files(Path(source))
    ]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in blueprint.parameters.items()]
    parts = [
        stats,
        dataclasses.astuple(blueprint.hf),
        shapes,
        blueprint.layout.describe(),
        blueprint.layout.rank,
        file_bytes,
        __version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _trainer_state(blueprint: Blueprint, source: str, network: str) -> dict[str, object]:
    layout = blueprint.layout
    return {
        "step": STEP,
        "weights_only": True,
        "converted_from": Path(source).name,
        "version": __version__,
        "world_size": layout.world_size,
        "layout": layout.describe(),
        "model": blueprint.shape(),
        "has_rng": False,
        "networks": {network: {"optimizer": [], "optimizer_step": 0.0, "scheduler": None}},
        "fingerprints": [
            {network: {}} for _ in range(layout.world_size)
        ],  # the manifest has the digests of the files
    }


def discard(root: str) -> None:
    """Remove leftovers of an interrupted conversion."""
    remove_folder(writing_folder(root, STEP))
