"""Write one network to files: megatron-core plans what each rank writes, and this module writes it
in threads, hashing on the fly.

megatron-core would start a process per file, and a manager process that imports the program again;
if a writer dies, its parent hangs. Threads are as fast, because hashing and writing release the
GIL.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from megatron_patches.patch import release
from megatron_patches.safe_checkpoints import load_metadata, load_tensors
from slime_like.checkpoints.files import FileRecord, hashed_file, write_file

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.planner import WriteItem


FORMAT = ("torch_dist", 1)
METADATA_FILE = ".metadata"
FILES = 2  # maximum number of files per rank
MANY_STRATEGIES = release() >= (0, 17)
OVERHEAD_BYTES = 2048  # maximum size of one tensor's container in a file


Item = tuple["WriteItem", io.BytesIO | torch.Tensor]


@dataclass(slots=True)
class FilePlan:
    """One file of this rank."""

    name: str
    items: list[Item]

    def estimated_bytes(self) -> int:
        return sum(OVERHEAD_BYTES + _bytes_of(data) for _, data in self.items)


@dataclass(slots=True)
class NetworkPlan:
    """What this rank writes for one network."""

    files: list[FilePlan]
    common: bytes | None  # state that is not sharded, written by rank 0
    metadata: Metadata | None  # on rank 0 only

    def estimated_bytes(self) -> int:
        return len(self.common or b"") + sum(file.estimated_bytes() for file in self.files)


@dataclass(slots=True)
class Written:
    """Result of writing on one rank."""

    records: dict[str, FileRecord] = field(default_factory=dict)  # by path inside the checkpoint
    # location of each item, by network
    results: dict[str, list[WriteResult]] = field(default_factory=dict)


class _Planner(TorchDistSaveShardedStrategy):
    """megatron-core's save planning, without writing."""

    def __init__(self) -> None:
        super().__init__(*FORMAT, thread_count=FILES)

    def plan(
        self, state: dict[str, object], folder: Path
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        # since 0.17 the default strategy is from another package
        self.async_save(state, folder, **({"async_strategy": "mcore"} if MANY_STRATEGIES else {}))
        return self._planned

    def _get_save_and_finalize_callbacks(
        self,
        writer: FileSystemWriterAsync,
        save_state_dict_ret: tuple[object, Metadata | None],
        async_strategy: str = "mcore",
    ) -> AsyncRequest:
        self._planned = (writer, save_state_dict_ret[1])
        return AsyncRequest(None, (), [])


def plan_network(
    state: dict[str, object], folder: Path, *, rank: int, detached: bool
) -> NetworkPlan:
    """Plan what this rank writes for a network. Collective.

    Args:
        state: From `sharded_state`.
        folder: Existing folder of the network.
        detached: Copy tensors, so that training may continue while they are written.
    """
    sharded, common = save_preprocess(state)
    live = {data.data_ptr() for data in _tensors_of(sharded)}
    # otherwise megatron-core starts a manager process for the results, which we do not use
    filesystem_async._results_queue = queue.SimpleQueue()
    writer, metadata = _Planner().plan(sharded, folder)
    files = []
    for _, name, (objects, tensors) in writer.write_buckets or ():
        if detached:
            tensors = [(item, _detached(tensor, live)) for item, tensor in tensors]
        files.append(FilePlan(name, [*objects, *tensors]))
    return NetworkPlan(files, _common_bytes(common) if rank == 0 else None, metadata)


@contextmanager
def no_crc32() -> Iterator[None]:
    """Disable torch's CRC of every saved tensor, which is never verified; the SHA-256 of the
    manifest is."""
    enabled = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(enabled)


def write_items(
    folder: Path, name: str, items: Iterable[Item]
) -> tuple[FileRecord, list[WriteResult]]:
    """Write and sync one file in torch's distributed checkpoint format. Call within `no_crc32`."""
    transforms = _StorageWriterTransforms()
    results = []
    with hashed_file(folder / name) as file:
        for item, data in items:
            if isinstance(data, torch.Tensor):
                data = data.cpu()
            results.append(
                _write_item(
                    transforms,
                    file,  # type: ignore[arg-type]
                    data,
                    item,
                    name,
                    SerializationFormat.TORCH_SAVE,
                )
            )
    return file.record(), results


def write_network_metadata(
    folder: Path, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> dict[str, FileRecord]:
    """Write the metadata that make the files of all ranks a distributed checkpoint for
    megatron-core and torch. On rank 0, after all ranks have written."""
    metadata.version = CURRENT_DCP_VERSION
    locations = itertools.chain.from_iterable(results)
    metadata.storage_data = {result.index: result.storage_data for result in locations}
    metadata.storage_meta = StorageMeta()
    # megatron-core's cache of save plans; larger than the rest
    vars(metadata).pop("all_local_plans", None)
    content = pickle.dumps(metadata)
    load_metadata(io.BytesIO(content), METADATA_FILE)  # check that it can be loaded
    config = json.dumps(asdict(CheckpointingConfig(*FORMAT)))
    return {
        METADATA_FILE: write_file(folder / METADATA_FILE, content),
        CONFIG_FNAME: write_file(folder / CONFIG_FNAME, config),
    }


def common_file() -> str:
    return str(COMMON_STATE_FNAME)


def _common_bytes(common: Mapping[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.save(common, buffer)
    buffer.seek(0)
    load_tensors(buffer, COMMON_STATE_FNAME)  # check that it can be loaded
    return buffer.getvalue()


def _detached(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # others are already copies, made by the planning
    return tensor.clone() if tensor.data_ptr() in live else tensor


def _tensors_of(container: dict[str, object] | list[object]) -> list[torch.Tensor]:
    tensors = []
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, dict | list):
            tensors += _tensors_of(value)
        elif isinstance(data := getattr(value, "data", None), torch.Tensor):
            tensors.append(data)
    return tensors


def _bytes_of(data: torch.Tensor | io.BytesIO) -> int:
    return data.nbytes if isinstance(data, torch.Tensor) else data.getbuffer().nbytes
