"""A stream of whole tensors -> a Hugging Face folder that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slime_like.checkpoints.files import sync_path
from slime_like.distributed.collectives import is_rank_zero, share
from slime_like.errors import RunError
from slime_like.weights.families import LM_HEAD
from slime_like.weights.safetensors_reader import file_names
from slime_like.weights.safetensors_writer import ShardPlan, TensorPlan, main_dtype, write_index

# What a folder needs besides weights and config.json: tokenizer, chat template, generation
# settings.
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
    folder: str,
    stream: Iterator[tuple[str, Tensor]],
    config_source_folder: str,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `stream` as safetensors (in shards, with an index, when over `max_shard_bytes`), with
    config.json and the tokenizer files of `config_source_folder`.

    Every rank must call it, for taking the stream's tensors is a collective operation. Rank 0 alone
    writes, holding at most
    `max_shard_bytes` of tensors (or one tensor) in CPU memory. All is written beside `folder` and
    renamed once it is on
    disk: a reader sees a whole folder or none. An earlier save at `folder` is replaced. Raises, on
    every rank: ValueError when `folder` holds something other than a Hugging Face model or is the
    source itself, or the source has no config.json; RunError when writing fails (disk full, no
    permission).
    """
    error: Exception | None = None
    if is_rank_zero():
        try:
            write_hf(Path(folder), stream, Path(config_source_folder), max_shard_bytes)
        except (OSError, ValueError, RuntimeError) as caught:
            kind = ValueError if isinstance(caught, ValueError) else RunError
            error = kind(f"saving to Hugging Face format failed: {caught}")
            error.__cause__ = caught
    # the rest on rank 0 after an error, all of it elsewhere: the collectives must go on together
    for _ in stream:
        pass
    share(None, error)


def write_hf(
    folder: Path,
    stream: Iterator[tuple[str, Tensor]],
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Rank 0's part of `save_hf`, which raises its errors here: the other ranks take their tensors
    of the stream meanwhile."""
    check_folders(folder, source)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    temporary.mkdir(parents=True)
    try:
        shards = _write_weights(temporary, stream, max_shard_bytes)
        names = {tensor.name for shard in shards for tensor in shard.tensors}
        finish_folder(
            temporary, folder, source, dtype=main_dtype(shards), own_head=LM_HEAD in names
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish_folder(
    temporary: Path,
    folder: Path,
    source: Path,
    *,
    dtype: str,
    value_head: bool = False,
    own_head: bool = False,
) -> None:
    """Give a folder that has the weights all the rest, config.json last, and then its name. dtype:
    of most weights. value_head: they are a critic's, which transformers loads as a model that
    classifies tokens. own_head: the output layer's weight is among them, and so is not the
    embedding, whatever the source says."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, temporary / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 4, transformers 5
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if own_head and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
    if value_head:
        config["architectures"] = [
            name.replace("ForCausalLM", "ForTokenClassification")
            for name in config["architectures"]
        ]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in [*temporary.iterdir(), temporary]:
        sync_path(path)
    put_in_place(temporary, folder)


def check_folders(folder: Path, source: Path) -> None:
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json to go with the weights")
    if folder.exists() and folder.samefile(source):
        raise ValueError(f"{folder} is the folder that the model came from; save elsewhere")
    if folder.exists() and not (
        folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))
    ):
        raise ValueError(
            f"{folder} exists and holds no Hugging Face model; it is not replaced. Remove it or save elsewhere"
        )


def _write_weights(
    folder: Path, stream: Iterator[tuple[str, Tensor]], max_shard_bytes: int
) -> list[ShardPlan]:
    """Write all tensors and the index. How many files there will be, and so their names, is known
    at the end."""
    groups: list[tuple[TensorPlan, ...]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        groups.append(tuple(TensorPlan.of(name, tensor) for name, tensor in pending.items()))
        save_file(pending, folder / f"{len(groups)}.part", metadata={"format": "pt"})
        pending.clear()

    for name, tensor in stream:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous()
    flush()
    shards = [
        ShardPlan(name, group) for name, group in zip(file_names(len(groups)), groups, strict=True)
    ]
    for number, shard in enumerate(shards, start=1):
        (folder / f"{number}.part").rename(folder / shard.file_name)
    write_index(folder, shards)
    return shards


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename, moving an earlier save out of the way first and deleting it last."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
