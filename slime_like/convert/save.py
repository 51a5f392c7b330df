"""A stream of whole tensors -> a Hugging Face folder that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from slime_like.errors import RunError

# What a folder needs besides weights and config.json: tokenizer, chat template, generation settings.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
DEFAULT_SHARD_BYTES = 5 * 2**30


def save_hf(
    folder: str, stream: Iterator[tuple[str, Tensor]], config_source_folder: str, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write `stream` as safetensors (in shards, with an index, when over `max_shard_bytes`), with config.json and the
    tokenizer files of `config_source_folder`.

    Every rank must call it, for taking the stream's tensors is a collective operation. Rank 0 alone writes, holding at most
    `max_shard_bytes` of tensors (or one tensor) in CPU memory. All is written beside `folder` and renamed once it is on
    disk: a reader sees a whole folder or none. An earlier save at `folder` is replaced.
    Raises, on every rank: ValueError when `folder` holds something other than a Hugging Face model or is the source
    itself, or the source has no config.json; RunError when writing fails (disk full, no permission).
    """
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            _write(Path(folder), stream, Path(config_source_folder), max_shard_bytes)
        except (OSError, ValueError, RuntimeError) as caught:
            error = caught
    for _ in stream:  # the rest on rank 0 after an error, all of it elsewhere: the collectives must go on together
        pass
    _raise_on_every_rank(error)


def _raise_on_every_rank(error: Exception | None) -> None:
    report = [(isinstance(error, ValueError), f"saving to Hugging Face format failed: {error}") if error else None]
    if dist.is_initialized():
        dist.broadcast_object_list(report, src=0)
    if report[0] is not None:
        users_fault, message = report[0]
        raise (ValueError if users_fault else RunError)(message) from error


def _write(folder: Path, stream: Iterator[tuple[str, Tensor]], source: Path, max_shard_bytes: int) -> None:
    check_folders(folder, source)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    temporary.mkdir(parents=True)
    try:
        dtypes = _write_weights(temporary, stream, max_shard_bytes)
        finish_folder(temporary, folder, source, dtype=max(dtypes, key=lambda name: dtypes[name]))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish_folder(temporary: Path, folder: Path, source: Path, *, dtype: str, value_head: bool = False) -> None:
    """Give a folder that has the weights all the rest, config.json last, and then its name. dtype: of most weights. value_head: they are a
    critic's, which transformers loads as a model that classifies tokens."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, temporary / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype  # transformers 4, transformers 5
    if value_head:
        config["architectures"] = [name.replace("ForCausalLM", "ForTokenClassification") for name in config["architectures"]]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in [*temporary.iterdir(), temporary]:
        _flush_to_disk(path)
    _put_in_place(temporary, folder)


def check_folders(folder: Path, source: Path) -> None:
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json to go with the weights")
    if folder.exists() and folder.samefile(source):
        raise ValueError(f"{folder} is the folder that the model came from; save elsewhere")
    if folder.exists() and not (folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))):
        raise ValueError(f"{folder} exists and holds no Hugging Face model; it is not replaced. Remove it or save elsewhere")


def _write_weights(folder: Path, stream: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> dict[str, int]:
    """Write all tensors and the index; return the bytes of each dtype, by its name ("bfloat16")."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    dtypes: dict[str, int] = {}

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        pending.clear()

    for name, tensor in stream:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "1.part").rename(folder / "model.safetensors")
        return dtypes
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": sum(dtypes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtypes


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename, moving an earlier save out of the way first and deleting it last."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _flush_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
