"""Convert a Hugging Face folder to a weights-only checkpoint for --load, --ref-load and
--critic-load, one parameter at a time.

Every rank of the layout writes the shards that it would own in a run, in files of bounded size. A
complete file has a marker next to it, and is reused if the conversion of the same model in the same
layout is repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from slime_like.conversion.meta_model import MetaModel
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.megatron.checkpoint.save import MIB
from slime_like.megatron.checkpoint.write import (
    FilePlan,
    Item,
    common_file,
    no_crc32,
    plan_network,
    write_items,
    write_network_metadata,
)
from slime_like.weights.hf_import import LoadPlan
from slime_like.weights.safetensors_reader import WeightFiles, weight_files

if TYPE_CHECKING:
    from slime_like.megatron.checkpoint.write import NetworkPlan


STEP = 0
FILE_BYTES = 2**30
NOTE = ".done.json"
Advance = Callable[[int], None]  # called with the bytes of every converted tensor


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion, summed over ranks."""

    folder: Path
    bytes: int
    files: int
    kept: int  # complete files reused from an interrupted conversion


def convert_to_megatron(
    meta_model: MetaModel,
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
    predicts = bool(meta_model.gpt.mtp_num_layers)
    with together(lambda: WeightFiles(source, predicts=predicts)) as files:
        loading = together(lambda: meta_model.plan_loading(files, source))
        plan_folder = folder / network
        together(lambda: plan_folder.mkdir(parents=True, exist_ok=True))
        plan = plan_network(meta_model.state, plan_folder, rank=dist.get_rank(), detached=False)
        identity = _identity(meta_model, source, file_bytes)
        job = _Job(meta_model, files, loading, plan_folder, identity, advance)
        items = itertools.chain.from_iterable(file.items for file in plan.files)
        plans = job.split(items, file_bytes)
        missing = [plan for plan in plans if not (plan_folder / plan.name).exists()]
        needed = sum(gather(sum(plan.estimated_bytes() for plan in missing)))
        from_rank_zero(lambda: _check_space(root, needed))
        try:
            written = together(lambda: job.write_all(plans, workers))
        except OSError as error:
            raise RunError(
                f"{folder} could not be written: {error}; complete files are kept, run the same "
                "command again"
            ) from error
    parts = gather(written)

    size = from_rank_zero(
        lambda: _complete(meta_model, source, root, network=network, plan=plan, parts=parts)
    )
    files_written = list(itertools.chain(*parts))
    kept = sum(reused for *_, reused in files_written)
    return Converted(checkpoint_folder(root, STEP), size, len(files_written), kept)


Written = tuple[str, FileRecord, list[WriteResult], bool]  # last: reused file
# (key, global offset) in the checkpoint -> (parameter, index of its shard)
Locations = dict[tuple[str, tuple[int, ...]], tuple[str, int]]


def _complete(
    meta_model: MetaModel,
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
    records = {}
    results = []
    for name, record, file_results, _ in itertools.chain(*parts):
        records[f"{network}/{name}"] = record
        results.append(file_results)
    assert plan.common is not None and plan.metadata is not None, "rank 0 coordinates"
    records[f"{network}/{common_file()}"] = write_file(plan_folder / common_file(), plan.common)
    metadata = write_network_metadata(plan_folder, plan.metadata, results)
    records |= {f"{network}/{name}": record for name, record in metadata.items()}
    state = _trainer_state(meta_model, source, network)
    records[TRAINER_FILE] = write_file(
        folder / TRAINER_FILE, json.dumps(state, indent=1, allow_nan=False)
    )
    for path in plan_folder.iterdir():
        # markers, and files of an interrupted conversion of another model
        if f"{network}/{path.name}" not in records:
            path.unlink()
    sync_path(plan_folder)
    write_manifest(folder, records, {"model": state["model"]})
    sync_path(folder)
    publish(root, STEP)
    return total_bytes(records)


@dataclass(frozen=True)
class _Job:
    """One rank's part of a conversion."""

    meta_model: MetaModel
    files: WeightFiles
    loading: LoadPlan
    folder: Path
    identity: str
    advance: Advance

    def split(self, items: Iterable[Item], file_bytes: int) -> list[FilePlan]:
        """Split write items into files of about `file_bytes`, keeping the shards of a parameter
        together."""
        order = {location: number for number, location in enumerate(self._locations())}
        items = sorted(items, key=lambda item: order.get(_location(item[0].index), -1))
        plans: list[FilePlan] = []
        size = file_bytes
        for item, data in items:
            if size >= file_bytes:
                plans.append(FilePlan(f"__{dist.get_rank()}_{len(plans)}.distcp", []))
                size = 0
            plans[-1].items.append((item, data))
            size += _tensor_bytes(data)
        return plans

    def _locations(self) -> Locations:
        locations = {}
        for name in self.meta_model.parameters:
            for number, piece in enumerate(self.meta_model.pieces(name)):
                locations[piece.key, tuple(piece.global_offset)] = (name, number)
        return locations

    def write_all(self, plans: Sequence[FilePlan], workers: int) -> list[Written]:
        locations = self._locations()
        with no_crc32(), ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda plan: self._write(plan, locations), plans))

    def _write(self, plan: FilePlan, locations: Locations) -> Written:
        if (kept := self._kept(plan)) is not None:
            self.advance(sum(_tensor_bytes(data) for _, data in plan.items))
            return kept
        record, results = write_items(self.folder, plan.name, self._read_items(plan, locations))
        entries = []
        for result in results:
            index = result.index
            start = result.storage_data.offset
            offset = None if index.offset is None else list(index.offset)
            entries.append((index.fqn, offset, index.index, start, result.size_in_bytes))
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
            results = []
            for fqn, offset, number, start, length in note["items"]:
                index = MetadataIndex(fqn, None if offset is None else torch.Size(offset), number)
                results.append(WriteResult(index, length, _StorageInfo(plan.name, start, length)))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if [result.index for result in results] != [item.index for item, _ in plan.items]:
            return None
        return plan.name, record, results, True

    def _read_items(self, plan: FilePlan, locations: Locations) -> Iterator[Item]:
        """The write items with their data: objects unchanged, tensors read from the model's files
        one parameter at a time."""
        current: str | None = None
        pieces: list[Tensor] = []
        for item, data in plan.items:
            if not isinstance(data, Tensor):
                yield item, data
                continue
            name, number = locations[_location(item.index)]
            if name != current:
                pieces.clear()  # freed before the next parameter is read
                meta = self.meta_model.parameters[name]
                shard = torch.empty(meta.shape, dtype=meta.dtype)
                self.loading.fill(name, shard, self.files)
                pieces = [piece.data for piece in self.meta_model.pieces(name, shard)]
                current = name
            piece = pieces[number].view(data.shape)
            # torch.save would write a view's full storage
            yield item, piece.clone() if piece.untyped_storage().nbytes() != piece.nbytes else piece
            self.advance(piece.nbytes)


def _tensor_bytes(data: Tensor | io.BytesIO) -> int:
    return data.nbytes if isinstance(data, Tensor) else 0


def _location(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _check_root(root: Path) -> None:
    if steps := complete_steps(root):
        reason = (
            f"has checkpoints already (steps {', '.join(map(str, steps))}); name another folder"
        )
        raise ConfigError([Problem("--save", root, reason)])
    if root.exists() and not root.is_dir():
        raise ConfigError([Problem("--save", root, "is a file; name a folder")])


def _check_space(root: str, needed: int) -> None:
    if (free := free_bytes(root)) < needed + 4 * MIB:
        raise OSError(
            f"--save {root}: needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free;"
            " name a folder on another disk"
        )


def _identity(meta_model: MetaModel, source: str, file_bytes: int) -> str:
    """Fingerprint of everything except its name that determines the bytes of a file."""
    stats = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in weight_files(Path(source))
    ]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in meta_model.parameters.items()]
    parts = [
        stats,
        dataclasses.astuple(meta_model.hf),
        shapes,
        meta_model.layout.describe(),
        meta_model.layout.rank,
        file_bytes,
        __version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _trainer_state(meta_model: MetaModel, source: str, network: str) -> dict[str, object]:
    layout = meta_model.layout
    return {
        "step": STEP,
        "weights_only": True,
        "converted_from": Path(source).name,
        "version": __version__,
        "world_size": layout.world_size,
        "layout": layout.describe(),
        "model": meta_model.shape(),
        "has_rng": False,
        "networks": {network: {"optimizer": [], "optimizer_step": 0.0, "scheduler": None}},
        # the manifest has the digests of the files
        "fingerprints": [{network: {}} for _ in range(layout.world_size)],
    }


def discard(root: str) -> None:
    """Remove leftovers of an interrupted conversion."""
    remove_folder(writing_folder(root, STEP))
