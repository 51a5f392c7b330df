"""What a checkpoint may make a process do when it is loaded: nothing. Payloads in each kind of
file, and in each way into it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_patches.safe_checkpoints import load_tensors, read_metadata  # noqa: E402


class Payload:
    """Makes the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class Builder:
    """The same through a class's constructor, which BUILD and NEWOBJ reach without naming a
    function."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return io.FileIO, (str(self.mark), "w")


def metadata(**changes: Any) -> Metadata:
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16),
        torch.Size([4]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))],
    )
    values: dict[str, Any] = {
        "state_dict_metadata": {"a.weight": tensor, "b": BytesStorageMetadata()},
        "storage_data": {
            MetadataIndex("a.weight", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 100)
        },
        "storage_meta": StorageMeta(checkpoint_id=Path("/some/where")),
        "version": "1.0.0",
    }
    return Metadata(**(values | changes))


def test_metadata_of_torch_is_read(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    path.write_bytes(pickle.dumps(metadata()))
    found = read_metadata(path)
    assert found.state_dict_metadata == metadata().state_dict_metadata
    assert found.storage_data == metadata().storage_data
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(metadata(), protocol=protocol))
        assert read_metadata(path).state_dict_metadata == metadata().state_dict_metadata


@pytest.mark.parametrize("kind", [Payload, Builder])
@pytest.mark.parametrize(
    "place", ["whole", "planner_data", "storage_data", "storage_meta", "key", "attribute"]
)
def test_a_payload_in_metadata_runs_nothing(tmp_path: Path, kind: Any, place: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / ".metadata"
    payload = kind(mark)
    found: Any = (
        payload
        if place == "whole"
        else metadata(**({place: payload} if place in ("planner_data", "storage_meta") else {}))
    )
    if place == "storage_data":
        found.storage_data[MetadataIndex("x")] = payload
    elif place == "key":
        found.state_dict_metadata["x"] = [payload]
    elif place == "attribute":
        found.extra = payload
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(
        ValueError,
        match=rf"{path} is damaged or not the metadata of a checkpoint: names .*which such a file has no use for",
    ):
        read_metadata(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # the payload is live: plain unpickling runs it
    assert mark.exists()


@pytest.mark.parametrize(
    "content", [b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.", b"", b"\x80\x04", b"I1\n."]
)  # fmt: skip
def test_other_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="the metadata of a"):
        read_metadata(path)


def test_getattr_reaches_members_of_enums_only(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__'\ntR."
    )
    with pytest.raises(ValueError, match="takes an attribute of"):
        read_metadata(path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".."])
def test_files_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(
        pickle.dumps(metadata(storage_data={MetadataIndex("a"): _StorageInfo(name, 0, 1)}))
    )
    with pytest.raises(ValueError, match="is not a file next to it"):
        read_metadata(path)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    """torch's environment variable, which turns its own safe default off, changes nothing."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)
    mark, path = tmp_path / "ran", tmp_path / "common.pt"
    torch.save({"a": torch.ones(2), "payload": Payload(mark)}, path)
    with pytest.raises(
        ValueError,
        match=r"common\.pt is damaged, or holds other things than tensors and plain values",
    ):
        load_tensors(path, str(path))
    assert not mark.exists()
    torch.save([{"a": torch.ones(2), "b": None}, io.BytesIO(b"fp8")], path)
    plain, buffer = load_tensors(path, str(path))
    assert torch.equal(plain["a"], torch.ones(2))
    assert buffer.getvalue() == b"fp8"


def nested_key(wrapped: str) -> bytes:
    """A pickle of {key: None}, or of set([key]): the key is a tuple that holds the one before it
    twice, sixty times over."""
    key = b"K\x01q\x00" + b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    if wrapped == "dict":
        return b"\x80\x02}" + key + b"Ns."
    if wrapped == "dict at once":
        return b"\x80\x02}(" + key + b"Nu."
    return b"\x80\x02cbuiltins\nset\n]" + key + b"a\x85R."


@pytest.mark.parametrize("wrapped", ["dict", "dict at once", "set"])
def test_a_key_that_never_ends_to_hash_is_refused(tmp_path: Path, wrapped: str) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(nested_key(wrapped))
    with pytest.raises(ValueError, match="for a key that is nested"):
        read_metadata(path)


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [
        (10**30, 4, "for an offset or a size"),
        (0, 10**30, "for an offset or a size"),
        (-1, 4, "for an offset or a size"),
        (90, 20, "it points to byte 110 of __0_0.distcp, which has 100"),
    ],
)
def test_places_outside_of_their_file(tmp_path: Path, offset: int, length: int, words: str) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    place = {
        MetadataIndex("a.weight", torch.Size([0])): _StorageInfo("__0_0.distcp", offset, length)
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(storage_data=place)))
    with pytest.raises(ValueError, match=words):
        read_metadata(tmp_path / ".metadata")
