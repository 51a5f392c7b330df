"""Distributed checkpoints are read without running what is in them.

Target    dist_checkpointing.strategies.torch: _get_filesystem_reader, MCoreLoadPlanner.load_bytes;
          dist_checkpointing.strategies.common: TorchCommonLoadStrategy.load_common.
Why       A checkpoint has three kinds of pickles. torch 2.13 reads `.metadata` with plain `pickle.load`, and the objects in
          the `.distcp` files with `torch.load(weights_only=False)`: whoever can write one of these files can run a program
          in the process that loads it. (Tensors it reads with weights_only=True.) Which entries are objects is told by
          `.metadata`, so that a tensor's name is enough to get there. `common.pt` is read by torch.load's default, which an
          environment variable of torch turns off.
          Here `.metadata` goes through an unpickler that knows the dozen types of such a file and no others, the files it
          names must lie beside it, and the rest is read with weights_only=True, whatever the environment says.
When      Always.
Versions  megatron-core 0.16.1; torch 2.11 to 2.13.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch

from megatron_patches.patch import ALWAYS, Patch, find

NAME = "safe_checkpoints"
STRATEGY = "dist_checkpointing.strategies.torch"
COMMON = "dist_checkpointing.strategies.common:TorchCommonLoadStrategy"

# module -> names that may be called or instantiated. None of them does more than hold values.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "dict", "list", "tuple"),
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}  # fmt: skip


def _member(cls: Any, name: Any) -> Any:
    """How newer Pythons pickle an enum's member: getattr(class, name)."""
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise pickle.UnpicklingError(f"takes an attribute of {cls!r}")
    return cls[name]


class MetadataUnpickler(pickle.Unpickler):
    """Loads the metadata of a distributed checkpoint; anything else in the file raises pickle.UnpicklingError before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ALLOWED["pathlib"]:
            return PurePath  # a name is enough
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"names {module}.{name}, which such a file has no use for")


def read_metadata(path: str | Path) -> Any:
    """The `.metadata` of a distributed checkpoint. Raises ValueError naming the file."""
    from torch.distributed.checkpoint.metadata import Metadata

    with open(path, "rb") as file:
        metadata = load_metadata(file, str(path))
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError(f"{path} does not hold the metadata of a distributed checkpoint")
    for info in (metadata.storage_data or {}).values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{path} points to {name!r}, which is not a file beside it")
    return metadata


def load_metadata(file: BinaryIO, name: str) -> Any:
    try:
        return MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(
            f"{name} is damaged or not the metadata of a checkpoint: {error or type(error).__name__}"
        ) from error


def load_tensors(file: Any, name: str) -> Any:
    """torch.load of tensors and plain values. Raises ValueError naming the file."""
    try:
        with torch.serialization.safe_globals(
            [io.BytesIO]
        ):  # Transformer Engine keeps its extra state in these
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"{name} is damaged, or holds other things than tensors and plain values: {reason}"
        ) from error


def check() -> None:
    find(NAME, f"{STRATEGY}:_get_filesystem_reader")
    find(NAME, f"{STRATEGY}:MCoreLoadPlanner")
    find(NAME, f"{COMMON}.load_common")


def install() -> None:
    strategy: Any = find(NAME, STRATEGY)
    planner: Any = find(NAME, f"{STRATEGY}:MCoreLoadPlanner")
    common: Any = find(NAME, COMMON)
    strategy._get_filesystem_reader = reader_factory()
    planner.load_bytes = load_bytes
    common.load_common = load_common


def reader_factory() -> Callable[..., Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class SafeReader(FileSystemReader):
        _metadata: Metadata | None = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if self._metadata is None:
                self._metadata = read_metadata(Path(self.path) / ".metadata")
                self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
                self._metadata.storage_meta.load_id = self.load_id
            return self._metadata

    return lambda checkpoint_dir, cache_metadata=False: SafeReader(checkpoint_dir)


def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """As torch's DefaultLoadPlanner.load_bytes."""
    from torch.distributed.checkpoint._nested_dict import set_element

    name = read_item.dest_index.fqn
    loaded = load_tensors(value, f"object {name!r} of the checkpoint")
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def load_common(self: Any, checkpoint_dir: str | Path) -> Any:
    path = Path(checkpoint_dir) / "common.pt"
    return load_tensors(path, str(path))


PATCH = Patch(NAME, ALWAYS, check, install)
