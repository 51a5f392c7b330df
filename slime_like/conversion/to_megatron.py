"""Convert a Hugging Face folder to a weights-only checkpoint for --load, --ref-load and
--critic-load, one parameter at a time.

Every rank of the layout writes the shards that it would own in a run, in files of bounded size. A
complete file has a marker next to it, and is reused if the conversion of the same model in the same
layout is repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from slime_like import __version__
from slime_like.checkpoints.files import (
    FileRecord,
    complete_file,
    mark_complete,
    remove_folder,
    write_file,
)
from slime_like.checkpoints.folders import (
    checkpoint_folder,
    complete_steps,
    publish,
    writing_folder,
)
from slime_like.checkpoints.manifest import total_bytes
from slime_like.config import ConfigError, Problem
from slime_like.conversion.network import Advance, Converted, MetaNetwork
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.megatron.checkpoint.networks import SavedNetwork
from slime_like.megatron.checkpoint.save import (
    TRAINER_BYTES,
    check_space,
    complete_checkpoint,
    describe_networks,
)
from slime_like.megatron.checkpoint.write import (
    OVERHEAD_BYTES,
    Item,
    NetworkPlan,
    Written,
    common_file,
    no_crc32,
    plan_network,
    write_items,
)
from slime_like.weights.hf_import import HfWeights
from slime_like.weights.safetensors_reader import weight_files

STEP = 0
FILE_BYTES = 2**30


def convert_to_megatron(
    network: MetaNetwork,
    source: str,
    root: str,
    *,
    workers: int,
    file_bytes: int = FILE_BYTES,
    advance: Advance = lambda size: None,
) -> Converted:
    """Write the model in `source` as checkpoint 0 in `root`, with one network: "critic" if it has a
    value head, otherwise "policy". Collective; each of `workers` threads holds one parameter of
    this rank.

    Raises:
        ValueError: On every rank: the model's files do not match its config.json.
        ConfigError: On every rank: `root` already has checkpoints.
        RunError: On every rank: writing failed.
    """
    folder = writing_folder(root, STEP)
    name = "critic" if network.value_head else "policy"
    from_rank_zero(lambda: _check_root(Path(root)))
    with together(lambda: network.open_hf(source)) as weights:
        together(lambda: (folder / name).mkdir(parents=True, exist_ok=True))
        plan = plan_network(network.state, folder / name, rank=dist.get_rank(), detached=False)
        job = _Job(network, weights, folder / name, _identity(network, source), advance)
        files = split(network, plan, file_bytes)
        missing = [file for file in files if not (folder / name / file.name).exists()]
        needed = sum(gather(sum(file.estimated_bytes for file in missing))) + TRAINER_BYTES
        remedy = "name a folder on another disk"
        from_rank_zero(lambda: check_space(Path(root), needed, remedy, what=f"--save {root}:"))
        try:
            parts = gather(together(lambda: job.write_all(files, workers)))
        except OSError as error:
            raise RunError(
                f"{folder} could not be written: {error}; complete files are kept, run the same "
                "command again"
            ) from error
    written = list(itertools.chain(*parts))
    networks = {name: SavedNetwork(network.chunks, None, None, network.layout)}
    state = {
        "step": STEP,
        "weights_only": True,
        "converted_from": Path(source).name,
        "version": __version__,
        "model": network.shape,
        # no fingerprints: the manifest has the digests of the files
        **describe_networks(networks, {name: network.layout}, {name: {}}, with_rng=False),
    }

    def complete() -> int:
        for path in folder.iterdir():
            if path.name != name:  # of an interrupted conversion of another network
                remove_folder(path) if path.is_dir() else path.unlink()
        records = {f"{name}/{file.name}": file.record for file in written}
        assert plan.common is not None, "rank 0 has it"
        records[f"{name}/{common_file()}"] = write_file(folder / name / common_file(), plan.common)
        for path in (folder / name).iterdir():
            # markers, and files of an interrupted conversion of another model
            if f"{name}/{path.name}" not in records:
                path.unlink()
        results = list(itertools.chain.from_iterable(file.results for file in written))
        part = Written(records, {name: results})
        size = total_bytes(complete_checkpoint(folder, {name: plan}, [part], state))
        publish(root, STEP)
        return size

    size = from_rank_zero(complete)
    kept = sum(file.kept for file in written)
    return Converted(checkpoint_folder(root, STEP), size, len(written), kept)


@dataclass(frozen=True, slots=True)
class _File:
    """One file of this rank."""

    name: str
    # (parameter, index of its shard, write item)
    items: list[tuple[str, int, WriteItem]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of the items

    @property
    def estimated_bytes(self) -> int:
        return sum(OVERHEAD_BYTES + size for size in self.sizes)


@dataclass(frozen=True, slots=True)
class _WrittenFile:
    name: str
    record: FileRecord
    results: list[WriteResult]
    kept: bool  # reused from an interrupted conversion


def split(network: MetaNetwork, plan: NetworkPlan, file_bytes: int) -> list[_File]:
    """Split what this rank writes into files of about `file_bytes`. The shards of a parameter stay
    together."""
    items = {_location(item.index): item for file in plan.files for item, _ in file.items}
    files: list[_File] = []
    for name in network.parameters:
        shards = {_location_of(shard): shard.data for shard in network.shards(name)}
        planned = [
            (number, location) for number, location in enumerate(shards) if location in items
        ]
        if not files or (planned and sum(files[-1].sizes) >= file_bytes):
            files.append(_File(f"__{dist.get_rank()}_{len(files)}.distcp"))
        for number, location in planned:
            files[-1].items.append((name, number, items.pop(location)))
            files[-1].sizes.append(shards[location].nbytes)
    assert not items, "everything else is common"
    return files


@dataclass(frozen=True)
class _Job:
    """One rank's part of a conversion."""

    network: MetaNetwork
    weights: HfWeights
    folder: Path
    identity: str
    advance: Advance

    def write_all(self, files: Sequence[_File], workers: int) -> list[_WrittenFile]:
        with no_crc32(), ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self._write, files))

    def _write(self, file: _File) -> _WrittenFile:
        path = self.folder / file.name
        indices = [item.index for _, _, item in file.items]
        identity = self.identity + hashlib.sha256(repr(indices).encode()).hexdigest()
        if (marker := complete_file(path, identity)) is not None:
            self.advance(sum(file.sizes))
            results = [
                WriteResult(index, size, _StorageInfo(file.name, start, size))
                for index, (start, size) in zip(indices, marker["places"], strict=True)
            ]
            record = FileRecord(marker["size"], marker["sha256"])
            return _WrittenFile(file.name, record, results, kept=True)
        record, results = write_items(self.folder, file.name, self._read(file))
        places = [(result.storage_data.offset, result.size_in_bytes) for result in results]
        mark_complete(path, record, identity, places=places)
        return _WrittenFile(file.name, record, results, kept=False)

    def _read(self, file: _File) -> Iterator[Item]:
        """The write items with their data, read from the model's files one parameter at a time."""
        for name, items in itertools.groupby(file.items, lambda item: item[0]):
            meta = self.network.parameters[name]
            parameter = torch.empty(meta.shape, dtype=meta.dtype)
            self.weights.fill(name, parameter)
            shards = self.network.shards(name, parameter)
            for _, number, item in items:
                assert item.tensor_data is not None, "no object"
                data = shards[number].data.view(item.tensor_data.chunk.sizes)
                # torch.save would write a view's full storage
                yield item, data if data.numel() == parameter.numel() else data.clone()
                self.advance(data.nbytes)
            del parameter, shards, data  # freed before the next parameter is read


def _location(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _location_of(shard: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    return shard.key, tuple(shard.global_offset)


def _check_root(root: Path) -> None:
    if steps := complete_steps(root):
        reason = (
            f"has checkpoints already (steps {', '.join(map(str, steps))}); name another folder"
        )
        raise ConfigError([Problem("--save", root, reason)])
    if root.exists() and not root.is_dir():
        raise ConfigError([Problem("--save", root, "is a file; name a folder")])


def _identity(network: MetaNetwork, source: str) -> str:
    """Fingerprint of everything except its items that determines the bytes of a file."""
    stats = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in weight_files(Path(source))
    ]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in network.parameters.items()]
    parts = [
        stats,
        dataclasses.astuple(network.hf),
        shapes,
        network.layout.describe(),
        network.layout.rank,
        __version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
