"""Read single tensors, or parts of them, from a distributed checkpoint saved in any layout, without
a process group or a model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_patches.safe_checkpoints import load_tensors, read_metadata
from slime_like.megatron.checkpoint.write import METADATA_FILE

Region = tuple[Sequence[int], Sequence[int]]  # offsets and sizes within the full tensor


def overlap(first: Region, second: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two regions overlap: slices within the first and within the second; None if nowhere."""
    slices = []
    for start, size, other_start, other_size in zip(*first, *second, strict=True):
        low = max(start, other_start)
        high = min(start + size, other_start + other_size)
        if low >= high:
            return None
        slices.append(
            (slice(low - start, high - start), slice(low - other_start, high - other_start))
        )
    return tuple(one for one, _ in slices), tuple(other for _, other in slices)


class CheckpointTensors:
    """The tensors of one network's folder. Raises ValueError naming the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = read_metadata(folder / METADATA_FILE)
        except OSError as error:
            raise ValueError(
                f"checkpoint {folder}: {METADATA_FILE} cannot be read ({error.strerror})"
            ) from error
        self.entries: dict[str, Any] = metadata.state_dict_metadata
        self._where = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.entries[key].properties.dtype

    def tensor_names(self) -> list[str]:
        return [
            key for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)
        ]

    def read_into(self, target: Tensor, key: str, offset: tuple[int, ...]) -> None:
        """Fill `target` with the region of the stored tensor that starts at `offset`, converted to
        target's dtype. Holds one stored piece in memory at a time. Raises ValueError if the stored
        pieces do not cover the region or a file is damaged.

        target: with as many dimensions as the stored tensor.
        """
        filled = 0
        for chunk in self.entries[key].chunks:
            slices = overlap((chunk.offsets, chunk.sizes), (offset, target.shape))
            if slices is None:
                continue
            piece = self._piece(key, tuple(chunk.offsets), tuple(chunk.sizes))
            target[slices[1]].copy_(piece[slices[0]])
            filled += target[slices[1]].numel()
        if filled != target.numel():
            raise ValueError(
                f"checkpoint {self.folder} has {filled} of {target.numel()} elements of {key}"
            )

    def _piece(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        info = self._where.get((key, offset))
        if info is None:
            raise ValueError(
                f"checkpoint {self.folder} has no location for {key} at offset {list(offset)}"
            )
        path = self.folder / info.relative_path
        try:
            with open(path, "rb") as file:
                view = _create_file_view(file, info.offset, info.length)
                buffered = io.BufferedReader(view) if isinstance(view, io.RawIOBase) else view
                tensor = load_tensors(cast(IO[bytes], buffered), f"{path}, {key}")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise ValueError(f"{path}, {key}: not a tensor of shape {list(sizes)}")
        return tensor
