"""Hugging Face safetensors -> the shards of this rank. Each rank reads only what it owns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from arguments.groups import GPTModelConfig
from arguments.hf_model import HfModel
from slime_like.convert.families import VALUE_HEAD, expert_number, family_map, global_parameters, model_sizes, unwrap
from slime_like.convert.mappings import Mapping, Part, Sizes
from slime_like.megatron_backend.layout import ParallelLayout

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16", "F64")  # safetensors' names
MAX_NAMED = 8  # names in one error message


class WeightFiles:
    """The tensors of a Hugging Face folder, opened lazily. A context manager; raises ValueError naming what is wrong."""

    def __init__(self, folder: str) -> None:
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}  # tensor name -> open file
        for path in weight_files(Path(folder)):
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ValueError(f"{path} cannot be read, it may be truncated or no safetensors file: {error}") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self._where[name].get_slice(name).get_dtype()

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along `dim` (0 or 1), in the file's dtype; nothing else is read."""
        rows = self._where[name].get_slice(name)
        return rows[start:stop] if dim == 0 else rows[:, start:stop]


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
    config = unwrap(model_chunks[0]).config
    sizes = model_sizes(config, gpt)
    family = family_map(hf.architecture, config, tied=not gpt.untie_embeddings_and_output_weights, value_head=value_head)
    local = dict(global_parameters(model_chunks))
    _check_model(local, family, hf.architecture, own_experts(sizes, layout))
    parts = {name: _parts(name, parameter, family[name], sizes, layout) for name, parameter in local.items()}
    with WeightFiles(folder) as files:
        absent = [name for name, mapping in VALUE_HEAD.items() if value_head and not mapping.hf_shapes(sizes).keys() <= files.names]
        family = {name: mapping for name, mapping in family.items() if name not in absent}
        _check_names(files, family, folder, sizes)
        _check_tensors(files, family, folder, sizes)
        for name, parameter in local.items():
            if name in absent:
                parameter.detach().zero_()
            else:
                _fill(parameter.detach(), family[name].dim, parts[name], files)


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
