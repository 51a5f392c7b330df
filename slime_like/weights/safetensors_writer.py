"""Write safetensors files of planned content one tensor at a time."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_like.checkpoints.files import hashed_file, mark_complete, replace_file
from slime_like.weights.buckets import as_bytes
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.safetensors_reader import DTYPE_NAMES, INDEX, TORCH_DTYPES, file_names


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file of tensors. Raises OSError if the disk fails, in place of the library's own
    error."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        match = re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[2]), match[1], str(path)) from error


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file and its tensors, in order."""

    file_name: str
    tensors: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(tensors: Iterable[TensorPlan], max_shard_bytes: int) -> list[ShardPlan]:
    """Split a model into files of at most `max_shard_bytes`, or of one larger tensor."""
    groups: list[list[TensorPlan]] = []
    size = 0
    for tensor in tensors:
        if not groups or size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return [
        ShardPlan(name, tuple(group))
        for name, group in zip(file_names(len(groups)), groups, strict=True)
    ]


def main_dtype(tensors: Iterable[TensorPlan]) -> str:
    """The dtype with the most bytes, under its name in config.json; tables of integers do not
    count."""
    by_dtype: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in TORCH_DTYPES.values():
            by_dtype[tensor.dtype] += tensor.nbytes
    return str(by_dtype.most_common(1)[0][0]).removeprefix("torch.")


def write_index(folder: Path, shards: Sequence[ShardPlan]) -> None:
    """Write the index of tensor names to files; nothing for a single file."""
    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        for shard in shards:
            weight_map |= dict.fromkeys((tensor.name for tensor in shard.tensors), shard.file_name)
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": weight_map,
        }
        replace_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def write_shard(
    folder: Path,
    plan: ShardPlan,
    tensors: Iterator[tuple[str, Tensor]],
    identity: str,
    advance: Callable[[int], None],
) -> None:
    """Write the file under a temporary name, sync, rename it, and write a marker that it is
    complete. `tensors` yields the plan's tensors in order."""
    part = folder / (plan.file_name + ".part")
    with hashed_file(part) as file:
        file.write(header(plan.tensors))
        for planned, (name, tensor) in zip(plan.tensors, tensors, strict=True):
            assert TensorPlan.of(name, tensor) == planned, name
            if tensor.numel():
                file.write(memoryview(as_bytes(tensor).numpy()))  # type: ignore[arg-type]
            advance(planned.nbytes)
    record = file.record()
    os.replace(part, folder / plan.file_name)
    mark_complete(folder / plan.file_name, record, identity)


def header(tensors: Sequence[TensorPlan]) -> bytes:
    """The header of a safetensors file: 8 bytes of length and the JSON, padded to a multiple of
    8."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
