"""Read single tensors, or parts of them, from a distributed checkpoint saved in any layout, without
a process group or a model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_patches.safe_checkpoints import load_tensors, read_metadata
from slime_like.megatron.checkpoint.write import METADATA_FILE


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
            low = [max(o, c) for o, c in zip(offset, chunk.offsets, strict=True)]
            high = [
                min(o + n, c + m)
                for o, n, c, m in zip(offset, target.shape, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            piece = self._piece(key, tuple(chunk.offsets), tuple(chunk.sizes))
            there = tuple(
                slice(a - c, b - c) for a, b, c in zip(low, high, chunk.offsets, strict=True)
            )
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            target[here].copy_(piece[there])
            filled += target[here].numel()
        if filled != target.numel():
            raise ValueError(
                f"checkpoint {self.folder} does not hold the whole of {key}: {filled} of {target.numel()} elements"
            )

    def _piece(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        info = self._where.get((key, offset))
        if info is None:
            raise ValueError(
                f"checkpoint {self.folder} does not say where {key} from {list(offset)} on lies"
            )
        path = self.folder / info.relative_path
        try:
            with open(path, "rb") as file:
                view = _create_file_view(file, info.offset, info.length)
                tensor = load_tensors(
                    io.BufferedReader(view) if isinstance(view, io.RawIOBase) else view,
                    f"{path}, {key}",
                )
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise ValueError(f"{path}, {key}: what lies there is not a tensor {list(sizes)}")
        return tensor
