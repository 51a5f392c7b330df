"""Write a stream of full tensors as a Hugging Face folder that transformers can load."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import ties_embeddings
from arguments.hf.quantization import folder_quantization, read_quantization
from slime_like.checkpoints.files import read_json, sync_path
from slime_like.checkpoints.folders import check_replaceable
from slime_like.checkpoints.replacement import (
    discard,
    folder_to_replace,
    new_folder,
    replace_folder,
)
from slime_like.data.tokenizer import VOCABULARY_FILES
from slime_like.distributed.collectives import from_rank_zero, gather, is_rank_zero, together
from slime_like.errors import RunError
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.families import LM_HEAD, head_name, model_families
from slime_like.weights.gather import WeightStream
from slime_like.weights.parameter_map import SCORE
from slime_like.weights.quantized import find_quantized_weights
from slime_like.weights.safetensors_reader import WeightFiles, file_names
from slime_like.weights.safetensors_writer import (
    ShardPlan,
    main_dtype,
    save_tensors,
    write_index,
)

# Files of a folder other than weights and config.json: tokenizer, chat templates, generation
# settings.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    *VOCABULARY_FILES,
    "merges*",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",  # for images and videos
    "video_preprocessor_config.json",
    "processor_config.json",
)
# Files that may name classes in the folder's own code
_NAME_CODE = ("config.json", "tokenizer_config.json", "processor_config.json")
_TASK = re.compile(r"For(?:CausalLM|(?:Sequence|Token)Classification)$")
DEFAULT_SHARD_BYTES = 5 * 2**30


def save_hf(
    folder: str,
    stream: Iterator[tuple[str, Tensor]],
    config_source_folder: str,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    extra: Iterable[tuple[str, Tensor]] = (),
    duplicates: Mapping[str, str] | None = None,
    *,
    every_rank: bool = False,
) -> None:
    """Write `stream` as safetensors (sharded, with an index, if over `max_shard_bytes`), with
    config.json and the tokenizer files of `config_source_folder`. Collective.

    If a `WeightStream` needs more than one file and all ranks see the folder, every sender writes
    its own weights; otherwise rank 0 writes everything. The writers of a host hold at most
    `max_shard_bytes` of tensors (or one tensor each) in CPU memory. The output replaces `folder`
    when it is complete on disk.

    Args:
        extra: Additional weights, written by rank 0.
        duplicates: Name of a duplicate -> tensor that it repeats; written if the source has it.
        every_rank: Each rank writes its part of a stream that is not a `WeightStream` to a shared
            folder.

    Raises:
        ValueError: On every rank: `folder` holds something other than a Hugging Face model or is
            the source itself, or the source has no config.json.
        RunError: On every rank: writing failed (disk full, no permission).
    """
    target = Path(folder)
    source = Path(config_source_folder)
    temporary: Path | None = None
    rank_zero = is_rank_zero()
    writes = rank_zero or every_rank
    weights = stream

    def write() -> list[SavedPart]:
        assert temporary is not None
        try:
            with _as_saving_errors():
                local = with_duplicates(weights, duplicates or {}, source)
                local = chain(local, extra if rank_zero else ())
                return _write_parts(temporary, local, max_shard_bytes) if writes else []
        finally:
            for _ in weights:  # collective: consume it after errors and on ranks without a part
                pass

    try:
        temporary = from_rank_zero(lambda: _as_saving_errors()(_make_temporary)(target, source))
        if isinstance(stream, WeightStream):
            is_large = sum(planned.nbytes for planned in stream.plan) > max_shard_bytes
            every_rank = is_large and all(gather(temporary.is_dir()))
            weights = stream.own() if every_rank else stream.to_rank_zero()
            writes = rank_zero or every_rank
        if every_rank:
            max_shard_bytes //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        parts = list(chain(*gather(together(write))))
        from_rank_zero(lambda: _as_saving_errors()(_finish)(temporary, target, source, parts))
    finally:
        if rank_zero and temporary is not None:
            discard(temporary)


def with_duplicates(
    stream: Iterable[tuple[str, Tensor]], duplicates: Mapping[str, str], source: Path
) -> Iterator[tuple[str, Tensor]]:
    """The stream, with the duplicates that the folder `source` has after their tensors."""
    if not duplicates:
        yield from stream
        return
    with WeightFiles(str(source)) as files:
        present = [copy for copy in duplicates if copy in files.names]
    for name, tensor in stream:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy in present if duplicates[copy] == name)


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
    temporary = _make_temporary(folder, source)
    try:
        _finish(temporary, folder, source, _write_parts(temporary, stream, max_shard_bytes))
    finally:
        discard(temporary)


def _make_temporary(folder: Path, source: Path) -> Path:
    check_folders(folder, source)
    return new_folder(folder)


def _finish(temporary: Path, folder: Path, source: Path, parts: Sequence[SavedPart]) -> None:
    """Rename the parts, now that their number is known, complete the folder and rename it."""
    shards = [
        ShardPlan(name, part.tensors)
        for name, part in zip(file_names(len(parts)), parts, strict=True)
    ]
    for shard, part in zip(shards, parts, strict=True):
        (temporary / part.file_name).rename(temporary / shard.file_name)
    complete_folder(temporary, source, shards)
    replace_folder(temporary, folder)


def complete_folder(
    temporary: Path,
    source: Path,
    shards: Sequence[ShardPlan],
    *,
    value_task: str = "ForSequenceClassification",
    quantization: Mapping[str, object] | None = None,
) -> None:
    """Complete a folder that has the files `shards`; see `finish_folder`.

    Args:
        value_task: Class name suffix in transformers of a model with a scalar head.
        quantization: See `finish_folder`.
    """
    write_index(temporary, shards)
    tensors = {plan.name: plan for shard in shards for plan in shard.tensors}
    form = read_quantization(quantization) or folder_quantization(str(source))
    quantized = form is not None and find_quantized_weights(tensors, form, str(source))
    finish_folder(
        temporary,
        source,
        dtype=None if quantized else main_dtype(tensors.values()),
        value_task=value_task if SCORE in tensors else None,
        untied_head=not tensors.keys().isdisjoint(head_names(source)),
        quantization=quantization,
    )


def finish_folder(
    temporary: Path,
    source: Path,
    *,
    dtype: str | None,
    value_task: str | None = None,
    untied_head: bool = False,
    quantization: Mapping[str, object] | None = None,
) -> None:
    """Complete a folder that has the weights: copy the other files, write config.json last, and
    sync everything.

    Args:
        dtype: Of most weights; None: as in the source's config.json, quantised.
        value_task: Class name suffix in transformers of a model with a scalar head.
        untied_head: The output layer's weight is among the weights, so the embedding is not tied,
            whatever the source says.
        quantization: The `quantization_config` of weights that are not quantised in the source.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _copy_others(source, temporary)
    for part in (config, config.get("text_config") or {}):
        if dtype is not None:
            # the key in transformers 4 and 5
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype
            part.pop("quantization_config", None)
    if untied_head:
        parts = [part for part in (config, config.get("text_config")) if part is not None]
        stated = [part for part in parts if part.get("tie_word_embeddings") is not None]
        if not stated and ties_embeddings(str(source)):  # as a family does that does not say so
            stated = parts
        for part in stated:
            part["tie_word_embeddings"] = False
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    if value_task is not None:
        config["architectures"] = [_TASK.sub(value_task, name) for name in config["architectures"]]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in [*temporary.rglob("*"), temporary]:
        sync_path(path)


def head_names(source: Path) -> set[str]:
    """Names that the output layer of a model with this folder's config.json may have."""
    named = read_json(source / "config.json").get("architectures") or []
    return {LM_HEAD, *(head_name(each) for each in named if each in model_families.names())}


def _copy_others(source: Path, target: Path) -> None:
    """Copy the files other than weights and config.json, and the code that they refer to, which may
    import further files."""
    own_code = ("*.py",) if any(map(_has_own_code, (source / n for n in _NAME_CODE))) else ()
    for pattern in (*COPIED, *own_code):
        for path in source.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def _has_own_code(path: Path) -> bool:
    try:
        return bool(read_json(path).get("auto_map"))
    except (OSError, ValueError, AttributeError):
        return False  # missing, or no object: nothing that could be loaded


def check_folders(folder: Path, source: Path) -> None:
    """Raise ValueError if `source` has no config.json, or `folder` must not be replaced."""
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json to go with the weights")
    folder_to_replace(folder)  # raises for a link to nothing, and may restore the folder
    if folder.exists() and folder.samefile(source):
        raise ValueError(f"{folder} is the folder that the model came from; save elsewhere")
    check_replaceable(folder, "config.json", "Hugging Face model")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A file before its final name is known."""

    file_name: str
    tensors: tuple[TensorPlan, ...]


def _write_parts(
    folder: Path, stream: Iterator[tuple[str, Tensor]], max_shard_bytes: int
) -> list[SavedPart]:
    parts: list[SavedPart] = []
    pending: dict[str, Tensor] = {}
    rank = dist.get_rank() if dist.is_initialized() else 0

    def flush() -> None:
        tensors = tuple(TensorPlan.of(name, tensor) for name, tensor in pending.items())
        parts.append(SavedPart(f"{rank}-{len(parts)}.part", tensors))
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
