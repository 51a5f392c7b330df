"""Hugging Face safetensors -> the shards of this rank. Each rank reads only what it owns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arguments.groups import GPTModelConfig
from arguments.hf_model import HfModel
from slime_like.convert.families import VALUE_HEAD, expert_number, family_map, global_parameters, model_sizes, unwrap
from slime_like.convert.mappings import Mapping, Part, Sizes
from slime_like.megatron_backend.layout import ParallelLayout

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}  # by safetensors' names
DTYPES = tuple(TORCH_DTYPES)
READ_BYTES = 16 * 2**20  # at a time
MAX_NAMED = 8  # names in one error message


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. start: byte in the file. dtype: safetensors' name."""

    file: int  # descriptor
    start: int
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of a Hugging Face folder, opened lazily. A context manager; raises ValueError naming what is wrong.

    Files are read, not mapped: pages of a mapped file count as this process's memory for as long as it is open, which for the whole of a
    model are as many bytes as it has."""

    def __init__(self, folder: str) -> None:
        self._files: list[int] = []
        self._where: dict[str, StoredTensor] = {}
        for path in weight_files(Path(folder)):
            try:
                with safe_open(path, framework="pt", device="cpu"):  # checks the header against the file's size
                    pass
                self._files.append(os.open(path, os.O_RDONLY))
            except (SafetensorError, OSError) as error:
                self.close()
                raise ValueError(f"{path} cannot be read, it may be truncated or no safetensors file: {error}") from error
            self._where |= _stored_tensors(self._files[-1])

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].shape

    def dtype(self, name: str) -> str:
        return self._where[name].dtype

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along `dim` (0 or 1), in the file's dtype. Along dimension 1 whole rows are read, some at a time."""
        stored = self._where[name]
        dtype = TORCH_DTYPES[stored.dtype]
        row = math.prod(stored.shape[1:]) * dtype.itemsize
        if dim == 0:
            out = torch.empty((stop - start, *stored.shape[1:]), dtype=dtype)
            _read_into(out, stored.file, stored.start + start * row)
            return out
        out = torch.empty((stored.shape[0], stop - start, *stored.shape[2:]), dtype=dtype)
        many = max(1, READ_BYTES // max(1, row))
        for first in range(0, stored.shape[0], many):
            rows = torch.empty((min(many, stored.shape[0] - first), *stored.shape[1:]), dtype=dtype)
            _read_into(rows, stored.file, stored.start + first * row)
            out[first : first + len(rows)] = rows[:, start:stop]
        return out


def _stored_tensors(file: int) -> dict[str, StoredTensor]:
    """The header of a safetensors file that the library has checked: 8 bytes of length, then JSON."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = json.loads(os.pread(file, length, 8))
    return {
        name: StoredTensor(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_into(tensor: Tensor, file: int, position: int) -> None:
    """Fill a contiguous tensor with a file's bytes from `position` on. Raises ValueError when the file ends early."""
    if not tensor.numel():
        return
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done : done + READ_BYTES]], position + done)
        if count == 0:
            raise ValueError("a file of weights became shorter while it was read; copy it again")
        done += count


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: the ones its index names, else model.safetensors."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(f"{index} names files that are not there: {_listed(absent)}")
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ValueError(f"{folder}: no {SINGLE} and no {INDEX} in this folder; other formats are not read (save the model with safetensors)")


def load_hf_weights(
    model_chunks: Sequence[Any], folder: str, *, hf: HfModel, gpt: GPTModelConfig, layout: ParallelLayout, value_head: bool = False
) -> None:
    """Fill every parameter of this rank's model chunks from the safetensors files in `folder`, cast to its dtype.

    model_chunks: this rank's GPTModels, wrapped or not. An optimizer built before must take the new values over
    (`reload_model_params`). Padding rows of the vocabulary become zero. value_head: the network is a critic; a head that the files do not
    have, weight or bias, becomes zero, and the output layer that they may have is left.
    Raises ValueError, the same on every rank and before any parameter has changed: an unreadable file, tensors that are
    missing, tensors that the model has no place for, shapes that differ (both are named), dtypes that are no floats.
    """
    local = dict(global_parameters(model_chunks))
    with WeightFiles(folder) as files:
        plan = plan_loading(local, files, folder, model_chunks[0], hf=hf, gpt=gpt, layout=layout, value_head=value_head)
        for name, parameter in local.items():
            plan.fill(name, parameter.detach(), files)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How this rank's parameters are made of a Hugging Face folder's tensors, all of which have been checked. absent: parts of a critic's head
    that are not there."""

    family: MappingOf[str, Mapping]
    parts: MappingOf[str, Sequence[Part]]
    absent: frozenset[str]

    def fill(self, name: str, shard: Tensor, files: WeightFiles) -> None:
        """Write the parameter `name` of this rank into `shard`, which has its shape."""
        if name in self.absent:
            shard.zero_()
        else:
            _fill(shard, self.family[name].dim, self.parts[name], files)


def plan_loading(
    local: MappingOf[str, Tensor],
    files: WeightFiles,
    folder: str,
    chunk: Any,
    *,
    hf: HfModel,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    value_head: bool = False,
) -> LoadPlan:
    """local: this rank's parameters by canonical name; only their shapes are looked at. chunk: one of its model chunks. Raises as
    `load_hf_weights`."""
    config = unwrap(chunk).config
    sizes = model_sizes(config, gpt)
    family = family_map(hf.architecture, config, tied=not gpt.untie_embeddings_and_output_weights, value_head=value_head)
    _check_model(dict(local), family, hf.architecture, own_experts(sizes, layout))
    parts = {name: _parts(name, parameter, family[name], sizes, layout) for name, parameter in local.items()}
    absent = [name for name, mapping in VALUE_HEAD.items() if value_head and not mapping.hf_shapes(sizes).keys() <= files.names]
    there = {name: mapping for name, mapping in family.items() if name not in absent}
    _check_names(files, there, folder, sizes)
    _check_tensors(files, there, folder, sizes)
    return LoadPlan(there, parts, frozenset(absent))


def _fill(shard: Tensor, dim: int, parts: Sequence[Part], files: WeightFiles) -> None:
    position = 0
    for part in parts:
        rows = shard.narrow(dim, position, len(part))
        if part.hf is None:
            rows.zero_()
        else:
            rows.copy_(files.read(part.hf, dim, part.start, part.stop))
        position += len(part)


def _parts(name: str, parameter: Tensor, mapping: Mapping, sizes: Sizes, layout: ParallelLayout) -> list[Part]:
    """What this rank's shard consists of; ValueError when that does not give the parameter's shape."""
    rank, size = (layout.tp_rank, layout.tp_size) if expert_number(name) is None else (layout.etp_rank, layout.etp_size)
    parts = mapping.parts(sizes, rank, size, rows=parameter.shape[mapping.dim])
    hf_name, hf_shape = next(iter(mapping.hf_shapes(sizes).items()))
    expected = list(hf_shape)
    expected[mapping.dim] = sum(map(len, parts))
    if tuple(parameter.shape) != tuple(expected):
        raise ValueError(f"the model's parameter {name} has shape {tuple(parameter.shape)}, but {hf_name} calls for {tuple(expected)}")
    return parts


def own_experts(sizes: Sizes, layout: ParallelLayout) -> range:
    """The experts of each layer that this rank has, or a part of."""
    share = sizes.experts // layout.ep_size
    return range(layout.ep_rank * share, (layout.ep_rank + 1) * share)


def _check_model(local: dict[str, Tensor], family: dict[str, Mapping], architecture: str, experts: range) -> None:
    """The model's layers have exactly the parameters of the family, of the experts those in `experts`."""
    layers = {name.split(".")[2] for name in local if name.startswith("decoder.layers.")}

    def belongs_here(name: str) -> bool:
        number = expert_number(name)
        return name.startswith("decoder.layers.") and name.split(".")[2] in layers and (number is None or number in experts)

    absent = [name for name in family if name not in local and belongs_here(name)]
    strange = local.keys() - family.keys()
    for words, names in (("lacks", absent), ("has, beyond those of the architecture,", strange)):
        if names:
            raise ValueError(f"the model was not built as {architecture}: it {words} the parameters {_listed(names)}")


def _check_names(files: WeightFiles, family: dict[str, Mapping], folder: str, sizes: Sizes) -> None:
    wanted = {name for mapping in family.values() for name in mapping.hf_shapes(sizes)}
    problems = []
    if missing := wanted - files.names:
        problems.append(f"missing tensors: {_listed(missing)}")
    # A tied model's file may repeat the embedding as lm_head, and old files hold rotary tables: transformers ignores both.
    surplus = {name for name in files.names - wanted if name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq")}
    if surplus:
        problems.append(f"tensors that the model has no place for: {_listed(surplus)}")
    if problems:
        raise ValueError(f"weights in {folder}: " + "; ".join(problems))


def _check_tensors(files: WeightFiles, family: dict[str, Mapping], folder: str, sizes: Sizes) -> None:
    problems = []
    for mapping in family.values():
        for name, shape in mapping.hf_shapes(sizes).items():
            if files.shape(name) != shape:
                problems.append(f"{name} has shape {files.shape(name)} in the file, the model needs {shape}")
            if files.dtype(name) not in DTYPES:
                problems.append(f"{name} has dtype {files.dtype(name)}; legal values: {', '.join(DTYPES)}")
    if problems:
        problems = list(dict.fromkeys(problems))
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ValueError(f"weights in {folder}: " + "; ".join(problems[:MAX_NAMED]) + more)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED]) + more
