"""Write a stream of full tensors as a Hugging Face folder that transformers can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from slime_like.checkpoints.files import sync_path
from slime_like.distributed.collectives import from_rank_zero, gather, is_rank_zero, together
from slime_like.errors import RunError
from slime_like.weights.families import LM_HEAD
from slime_like.weights.gather import TensorPlan, WeightStream
from slime_like.weights.parameter_map import SCORE
from slime_like.weights.safetensors_reader import WeightFiles, file_names
from slime_like.weights.safetensors_writer import (
    ShardPlan,
    is_quantized,
    main_dtype,
    save_tensors,
    write_index,
)

# Files of a folder other than weights and config.json: tokenizer, chat template, generation
# settings.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",  # for images and videos
    "video_preprocessor_config.json",
    "processor_config.json",
)
DEFAULT_SHARD_BYTES = 5 * 2**30


def save_hf(
    folder: str,
    stream: Iterator[tuple[str, Tensor]],
    config_source_folder: str,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    more: Iterable[tuple[str, Tensor]] = (),
    copies: Mapping[str, str] | None = None,
    *,
    every_rank: bool = False,
) -> None:
    """Write `stream` as safetensors (sharded, with an index, if over `max_shard_bytes`), with
    config.json and the tokenizer files of `config_source_folder`. Collective.

    If a `WeightStream` needs more than one file and all ranks see the folder, every sender writes
    its own weights; otherwise rank 0 writes everything. The writers of a host hold at most
    `max_shard_bytes` of tensors (or one tensor each) in CPU memory. The output is written next to
    `folder` and renamed when it is on disk, so readers never see a partial folder. An earlier save
    at `folder` is replaced.

    Args:
        more: Additional weights, written by rank 0.
        copies: Name of a duplicate -> tensor that it repeats; written if the source has the
            duplicate.
        every_rank: The stream is not a `WeightStream`, and each rank writes its own part into a
            shared folder.

    Raises:
        ValueError: On every rank: `folder` holds something other than a Hugging Face model or is
            the source itself, or the source has no config.json.
        RunError: On every rank: writing failed (disk full, no permission).
    """
    target, source = Path(folder), Path(config_source_folder)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    rank_zero, mine = is_rank_zero(), stream

    def prepare() -> Path:
        with _as_saving_errors():
            return _make_temporary(temporary, target, source)

    def write() -> list[Part]:
        try:
            with _as_saving_errors():
                own = with_copies(mine, copies, source) if copies and writes else mine
                whole = chain(own, more) if rank_zero else own
                return _write_parts(temporary, whole, max_shard_bytes) if writes else []
        finally:
            for _ in mine:  # collective: consume it after errors and on ranks that write nothing
                pass

    def finish() -> None:
        with _as_saving_errors():
            _finish(temporary, target, source, [part for parts in found for part in parts])

    try:
        temporary = from_rank_zero(prepare)
        writes = rank_zero or every_rank
        if isinstance(stream, WeightStream):
            is_large = sum(planned.nbytes for planned in stream.plan) > max_shard_bytes
            writes = is_large and all(gather(temporary.is_dir()))
            mine = stream.own() if writes else stream.to_rank_zero()
            every_rank, writes = writes, writes or rank_zero
        if every_rank:
            max_shard_bytes //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = gather(together(write))
        from_rank_zero(finish)
    finally:
        if rank_zero:
            shutil.rmtree(temporary, ignore_errors=True)


def with_copies(
    stream: Iterable[tuple[str, Tensor]], copies: Mapping[str, str], source: Path
) -> Iterator[tuple[str, Tensor]]:
    with WeightFiles(str(source)) as files:
        there = [(copy, own) for copy, own in copies.items() if copy in files.names]
    for name, tensor in stream:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy, own in there if own == name)


@contextmanager
def _as_saving_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as caught:
        kind = next((kind for kind in (ValueError, OSError) if isinstance(caught, kind)), RunError)
        raise kind(f"saving to Hugging Face format failed: {caught}") from caught


def write_hf(
    folder: Path,
    stream: Iterator[tuple[str, Tensor]],
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Like `save_hf`, by this process alone, which has all of `stream`."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        _make_temporary(temporary, folder, source)
        _finish(temporary, folder, source, _write_parts(temporary, stream, max_shard_bytes))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_temporary(temporary: Path, folder: Path, source: Path) -> Path:
    check_folders(folder, source)
    temporary.mkdir(parents=True)
    return temporary


def _finish(temporary: Path, folder: Path, source: Path, parts: Sequence[Part]) -> None:
    """Rename the parts, now that their number is known, and complete the folder."""
    shards = [
        ShardPlan(name, part.tensors)
        for name, part in zip(file_names(len(parts)), parts, strict=True)
    ]
    for shard, part in zip(shards, parts, strict=True):
        (temporary / part.file_name).rename(temporary / shard.file_name)
    write_index(temporary, shards)
    names = {tensor.name for shard in shards for tensor in shard.tensors}
    dtype = None if is_quantized(shards) else main_dtype(shards)
    task = "ForSequenceClassification" if SCORE in names else None
    own = LM_HEAD in names
    finish_folder(temporary, folder, source, dtype=dtype, value_task=task, own_head=own)


def finish_folder(
    temporary: Path,
    folder: Path,
    source: Path,
    *,
    dtype: str | None,
    value_task: str | None = None,
    own_head: bool = False,
) -> None:
    """Complete a folder that has the weights: copy the other files, write config.json last, and
    rename the folder. dtype: of most weights; None: as in the source's config.json, quantised.
    value_task: class name suffix in transformers of a model with a scalar head. own_head: the
    output layer's weight is among the weights, so the embedding is not tied, whatever the source
    says."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    own_code = ("*.py",) if config.get("auto_map") else ()  # code files that auto_map refers to
    for pattern in (*COPIED, *own_code):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, temporary / path.name)
    for part in (config, config.get("text_config") or {}):
        if dtype is not None:
            # the key in transformers 4 and 5
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype
            part.pop("quantization_config", None)
        if own_head and part.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = False
    if value_task is not None:
        config["architectures"] = [
            name.replace("ForCausalLM", value_task) for name in config["architectures"]
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


@dataclass(frozen=True, slots=True)
class Part:
    """A file before its final name is known."""

    file_name: str
    tensors: tuple[TensorPlan, ...]


def _write_parts(
    folder: Path, stream: Iterator[tuple[str, Tensor]], max_shard_bytes: int
) -> list[Part]:
    parts: list[Part] = []
    pending: dict[str, Tensor] = {}
    rank = dist.get_rank() if dist.is_initialized() else 0

    def flush() -> None:
        tensors = tuple(TensorPlan.of(name, tensor) for name, tensor in pending.items())
        parts.append(Part(f"{rank}-{len(parts)}.part", tensors))
        save_tensors(folder / parts[-1].file_name, pending, {"format": "pt"})
        pending.clear()

    size = 0
    for name, tensor in stream:
        if pending and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if pending:
        flush()
    return parts


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename, moving an earlier save out of the way first and deleting it last."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
