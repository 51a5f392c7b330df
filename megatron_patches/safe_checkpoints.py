"""Read distributed checkpoints without executing code from them.

Target    dist_checkpointing.strategies.torch: _get_filesystem_reader, MCoreLoadPlanner.load_bytes.
          For the part that is not sharded: strategies.common: TorchCommonLoadStrategy.load_common
          in megatron-core 0.16, dist_checkpointing.serialization: load_common and
          load_common_state_dict in later versions.
Why       A checkpoint contains three kinds of pickles. torch 2.13 reads `.metadata` with plain
          `pickle.load`, and objects in the `.distcp` files with `torch.load(weights_only=False)`.
          (Tensors are read with weights_only=True, but `.metadata` decides which entries are
          objects, so any entry can be turned into one.) `common.pt` is read with torch.load's
          default, which an environment variable can turn into weights_only=False. Without a
          `common.pt`, megatron-core 0.19 reads an object `common_state` as torch reads objects.
Without   Whoever can write one of these files can execute code in the process that loads it.
How       `.metadata` is read by an unpickler that accepts only the dozen types of such a file, the
          files that it names must be in the same folder, and everything else is read with
          weights_only=True, whatever the environment says.
When      Always.
Versions  megatron-core 0.16.1 to 0.19; torch 2.11 to 2.13.
"""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar

import torch

from megatron_patches.patch import ALWAYS, Patch, find, release
from slime_like.checkpoints.files import open_regular, size_inside

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem


NAME = "safe_checkpoints"
STRATEGY = "dist_checkpointing.strategies.torch"
SERIALIZATION = "dist_checkpointing.serialization"
COMMON_STRATEGY = "dist_checkpointing.strategies.common:TorchCommonLoadStrategy"  # until 0.16
COMMON_READERS = ("load_common", "load_common_state_dict")  # since 0.17
COMMON_STATE = "common_state"  # since 0.19

# module -> names that may be called or instantiated. All of them only hold values.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
    ),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "dict", "list", "tuple"),
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}  # fmt: skip


def _member(cls: object, name: str) -> object:
    """Replacement for getattr(class, name), as newer Python versions pickle enum members."""
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise pickle.UnpicklingError(f"takes an attribute of {cls!r}")
    return cls[name]


_PythonUnpickler: Any = pickle._Unpickler  # in Python, so that single opcodes can be overridden


class MetadataUnpickler(_PythonUnpickler):
    """Load the metadata of a distributed checkpoint; for anything else in the file raise
    pickle.UnpicklingError before it is called.

    Keys of dictionaries must not nest: hashing a tuple that contains the same tuple twice, sixty
    levels deep, never ends."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> object:
        if module in ("pathlib", "pathlib._local") and name in ALLOWED["pathlib"]:
            return PurePath  # without access to the file system
        if name in ALLOWED.get(module, ()):
            kind = super().find_class(module, name)
            return _checking_keys(kind) if kind in _HASHING else kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"names {module}.{name}, which such a file has no use for")

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    def load_dict(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_dict()

    def load_additems(self) -> None:
        for key in self.stack:
            _check_key(key)
        super().load_additems()

    def load_frozenset(self) -> None:
        for key in self.stack:
            _check_key(key)
        super().load_frozenset()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset


_HASHING = (set, frozenset, dict, collections.OrderedDict)


def _checking_keys(kind: Callable[[list[object]], object]) -> Callable[..., object]:
    def make(items: Iterable[object] = ()) -> object:
        items = list(items)
        for item in items:
            _check_key(item[0] if isinstance(item, tuple | list) and item else item)
        return kind(items)

    return make


def _check_key(key: object) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    plain = (str, int, float, bytes, type(None), enum.Enum)
    if isinstance(key, MetadataIndex):
        parts = (key.fqn, key.index, *(key.offset or ()))
    else:
        parts = key if type(key) is tuple else (key,)
    if not all(isinstance(part, plain) for part in parts):
        raise pickle.UnpicklingError(f"has a {type(key).__name__} for a key that is nested")


def read_metadata(path: str | Path) -> Metadata:
    """Read the `.metadata` of a distributed checkpoint and check that the files it names exist and
    are large enough.

    Raises:
        ValueError: The file or an entry is invalid; the message names the file.
        FileNotFoundError: There is no such file.
    """
    path = Path(path)
    try:
        with open_regular(path, path.parent.parent) as file:
            metadata = load_metadata(io.BytesIO(file.read()), str(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        return _checked_metadata(metadata, path.parent)
    except (ValueError, OSError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold the metadata of a distributed checkpoint: {error}"
        ) from error


def _checked_metadata(metadata: object, folder: Path) -> Metadata:
    """Validate types, numbers and files of all entries before they are used. On invalid metadata it
    raises ValueError, OSError, AttributeError or TypeError."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        TensorStorageMetadata,
    )

    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it is of another type")
    locations = metadata.storage_data or {}
    if not isinstance(locations, dict):
        raise ValueError("it has no locations of tensors")
    sizes: dict[str, int] = {}
    for info in locations.values():
        name = info.relative_path
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"it points to {name!r}, which is not a file next to it")
        if name not in sizes:
            sizes[name] = size_inside(folder / name, folder.parent)
        _check_counts(name, info.offset, info.length)
        if info.offset + info.length > sizes[name]:
            end = info.offset + info.length
            raise ValueError(f"it points to byte {end} of {name}, which has {sizes[name]}")
    located = {(index.fqn, tuple(index.offset or ())) for index in locations}
    chunks = 0
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError("the name of an entry is no text")
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{key!r:.200} is neither a tensor nor an object")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"{key!r:.200} has no dtype")
        _check_counts(key, *entry.size)
        chunks += len(entry.chunks)
        if chunks > len(locations):
            raise ValueError("it has more parts of tensors than locations")
        for chunk in entry.chunks:
            _check_counts(key, *chunk.offsets, *chunk.sizes)
            ends = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)]
            inside = (end <= size for end, size in zip(ends, entry.size, strict=True))
            if len(ends) != len(entry.size) or not all(inside):
                raise ValueError(f"a part of {key!r:.200} is outside of it")
            if (key, tuple(chunk.offsets)) not in located:
                raise ValueError(f"it has no location of a part of {key!r:.200}")
    return metadata


def _check_counts(name: str, *numbers: object) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"{name!r:.200} has {number!r:.40} for an offset or a size")


def load_metadata(file: BinaryIO, name: str) -> object:
    try:
        return MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{name} is damaged or not the metadata of a checkpoint: {reason}"
        ) from error


def load_tensors(file: Path | IO[bytes], name: str) -> Any:
    """torch.load with weights_only=True: tensors and plain values. Raises ValueError naming the
    file."""
    try:
        # Transformer Engine stores its extra state in BytesIO
        with torch.serialization.safe_globals([io.BytesIO]):
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
    if release() < (0, 17):
        find(NAME, f"{COMMON_STRATEGY}.load_common")
    else:
        for name in COMMON_READERS:
            find(NAME, f"{SERIALIZATION}:{name}")


def install() -> None:
    find(NAME, STRATEGY)._get_filesystem_reader = open_checkpoint
    find(NAME, f"{STRATEGY}:MCoreLoadPlanner").load_bytes = load_bytes
    if release() < (0, 17):
        find(NAME, COMMON_STRATEGY).load_common = lambda self, folder: load_common(folder)
    else:
        for name in COMMON_READERS:
            setattr(find(NAME, SERIALIZATION), name, load_common)


def open_checkpoint(folder: str | Path, *args: object, **kwargs: object) -> FileSystemReader:
    """Open `folder` with a FileSystemReader that reads `.metadata` safely. megatron-core's further
    arguments, which configure caches, are ignored."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class SafeReader(FileSystemReader):
        _metadata: Metadata | None = None

        def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
            if self._metadata is None:
                self._metadata = read_metadata(Path(self.path) / ".metadata")
                self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
                self._metadata.storage_meta.load_id = self.load_id
            return self._metadata

    return SafeReader(folder)


def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Like torch's DefaultLoadPlanner.load_bytes, with weights_only=True."""
    from torch.distributed.checkpoint._nested_dict import set_element

    name = read_item.dest_index.fqn
    loaded = load_tensors(value, f"object {name!r} of the checkpoint")
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def load_common(folder: str | Path) -> StateDict:
    """Load the part that is not sharded: common.pt, or the object `common_state` that replaces it
    since megatron-core 0.19."""
    from torch.distributed import checkpoint

    path = Path(folder) / "common.pt"
    if release() < (0, 19) or path.exists():
        return load_tensors(path, str(path))
    key = find(NAME, "dist_checkpointing.mapping:ShardedObject")(COMMON_STATE, None, (1,), (0,))

    class Planner(checkpoint.DefaultLoadPlanner):
        load_bytes = load_bytes

    state: dict[str, Any] = {key.unique_key: io.BytesIO()}
    checkpoint.load(state, storage_reader=open_checkpoint(folder), planner=Planner(), no_dist=True)
    return state[key.unique_key][0]


PATCH = Patch(NAME, ALWAYS, check, install)
