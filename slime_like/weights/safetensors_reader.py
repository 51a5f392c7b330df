"""Read weights, or parts of them, lazily from the safetensors files of a Hugging Face folder.
Quantised weights are dequantised while reading."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arguments.hf.quantization import folder_quantization
from slime_like.checkpoints.files import open_regular, read_json
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.families import deepseek_v4
from slime_like.weights.families.kimi_linear import KIMI_LINEAR, published_name
from slime_like.weights.published import GEMMA3, QWEN3_VL_MOE, with_vision_model
from slime_like.weights.quantized import OTHER_SCALES, QuantizedWeight, find_quantized_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# by safetensors' dtype names
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
DTYPES = tuple(TORCH_DTYPES)
INTEGERS = ("I32", "I64")  # of tables
# dtypes of the tensors that store quantised weights
_STORED_DTYPES = {
    **TORCH_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Qwen3.5 without its vision tower: transformers may save it with the names of the full model
TEXT_ONLY = ({"Qwen3_5ForCausalLM"}, {"Qwen3_5MoeForCausalLM"})
GEMMA4 = "Gemma4ForConditionalGeneration"
LANGUAGE_MODEL = "model.language_model."
PREDICTION_LAYERS = "mtp.layers."
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
DTYPE_NAMES = {dtype: name for name, dtype in _STORED_DTYPES.items()}
END_BYTES = 4096  # bytes of a tensor's start and end in `weights_digest`
SAME_ROWS = 64  # rows at either end that `WeightFiles.is_copy` compares
READ_BYTES = 16 * 2**20  # bytes per read
MAX_NAMED = 8  # names listed in an error message


def file_names(number: int) -> list[str]:
    """transformers' file names of a model in `number` files."""
    if number == 1:
        return [SINGLE]
    return [f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor."""

    file: int  # descriptor
    start: int  # first byte in the file
    size: int  # bytes
    shape: tuple[int, ...]  # in the file
    dtype: str  # safetensors' name, possibly of an unsupported dtype
    swapped: bool = False  # the last two dimensions are read in the other order

    @property
    def read_shape(self) -> tuple[int, ...]:
        first = self.shape[:-2]
        return (*first, self.shape[-1], self.shape[-2]) if self.swapped else self.shape


class WeightFiles:
    """The weights of a Hugging Face folder, opened lazily. A context manager; raises ValueError
    naming the problem.

    A weight is a stored tensor or, if config.json has a `quantization_config`, dequantised from
    several of them (`quantized`, by name). stored: the tensors of the files; a layer's 3-D tensor
    of all experts is split into one entry per expert and projection. Files are read instead of
    memory-mapped, because mapped pages count towards the process's memory, up to the size of the
    model.

    Args:
        folder: The Hugging Face folder.
        predicts: Multi-token prediction layers are read too, whose experts are then split as well;
            otherwise their tensors are as in the files, to be copied.
    """

    def __init__(self, folder: str, *, predicts: bool = False) -> None:
        self._files: list[int] = []
        self.stored: dict[str, StoredTensor] = {}
        for path in weight_files(Path(folder)):
            try:
                with open_regular(path) as file:
                    self._files.append(os.dup(file.fileno()))
                with safe_open(path, framework="pt", device="cpu"):
                    pass  # checks the header against the file's size
                stored = stored_tensors(self._files[-1])
            except (SafetensorError, OSError, ValueError) as error:
                self.close()
                raise ValueError(
                    f"{path} cannot be read, it may be truncated or no safetensors file: {error}"
                ) from error
            self.stored |= stored
        try:
            self.stored = _own_names(self.stored, folder, predicts=predicts)
            self.quantized: Mapping[str, QuantizedWeight] = _quantized_weights(self.stored, folder)
        except ValueError:
            self.close()
            raise
        names = set(self.stored)
        for weight in self.quantized.values():
            names -= {plan.name for plan in weight.stored}
        if self.quantized:
            names = {name for name in names if not name.endswith(OTHER_SCALES)}
        self.names: frozenset[str] = frozenset(names | self.quantized.keys())

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.quantized:
            return self.quantized[name].shape
        return self.stored[name].read_shape

    def dtype(self, name: str) -> str:
        """safetensors' name of the dtype that `read` returns."""
        return "F32" if name in self.quantized else self.stored[name].dtype

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of a stored tensor. Raises ValueError if it is not supported."""
        dtype = _STORED_DTYPES.get(self.stored[name].dtype)
        if dtype is None:
            raise ValueError(
                f"{name} has dtype {self.stored[name].dtype}; legal values: "
                f"{', '.join(_STORED_DTYPES)}"
            )
        return dtype

    def is_copy(self, name: str, other: str) -> bool:
        """Whether two matrices have the same shape, and the same first and last rows in the lower
        of their precisions."""
        if self.shape(name) != self.shape(other):
            return False
        count = self.shape(name)[0]
        for start in (0, max(0, count - SAME_ROWS)):
            stop = min(count, start + SAME_ROWS)
            one, two = (self.read(each, 0, start, stop) for each in (name, other))
            dtype = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(one.to(dtype), two.to(dtype)):
                return False
        return True

    def ends(self, name: str) -> bytes:
        """The first and last `END_BYTES` bytes of a stored tensor."""
        stored = self.stored[name]
        count = min(stored.size, END_BYTES)
        return os.pread(stored.file, count, stored.start) + os.pread(
            stored.file, count, stored.start + stored.size - count
        )

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along `dim` (0 or 1), in the file's dtype, or float32 for a quantised
        weight. Along dimension 1, full rows are read, a few at a time."""
        if name not in self.quantized:
            return self._read_stored(name, dim, start, stop)
        shape = list(self.shape(name))
        shape[dim] = stop - start
        out = torch.empty(shape)
        self.read_into(out, name, dim, start, stop)
        return out

    def read_stored(self, name: str) -> Tensor:
        """A stored tensor, in full."""
        shape = self.stored[name].shape
        return self._read_stored(name, 0, 0, shape[0] if shape else 1).view(shape)

    def _read_stored(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        stored = self.stored[name]
        dtype = _STORED_DTYPES[stored.dtype]
        row = math.prod(stored.shape[1:]) * dtype.itemsize
        if dim == 0:
            out = torch.empty((stop - start, *stored.shape[1:]), dtype=dtype)
            _read_into(out, stored.file, stored.start + start * row)
            return out.transpose(-1, -2) if stored.swapped else out
        assert not stored.swapped, "tensors of all experts are read by expert"
        out = torch.empty((stored.shape[0], stop - start, *stored.shape[2:]), dtype=dtype)
        count = max(1, READ_BYTES // max(1, row))
        for first in range(0, stored.shape[0], count):
            size = min(count, stored.shape[0] - first)
            rows = torch.empty((size, *stored.shape[1:]), dtype=dtype)
            _read_into(rows, stored.file, stored.start + first * row)
            out[first : first + len(rows)] = rows[:, start:stop]
        return out

    def read_into(self, out: Tensor, name: str, dim: int, start: int, stop: int) -> None:
        """`read`, cast to the dtype of `out`. A quantised weight needs a few million elements of
        additional memory."""
        if name not in self.quantized:
            out.copy_(self.read(name, dim, start, stop))
            return
        weight = self.quantized[name]
        position = 0
        for first, last in weight.chunks(*((start, stop) if dim == 0 else (0, weight.shape[0]))):
            rows = weight.decode(lambda n, a, b: self._read_stored(n, 0, a, b), first, last)
            if dim != 0:
                rows = rows.narrow(dim, start, stop - start)
            out[position : position + len(rows)] = rows
            position += len(rows)


def weights_digest(folder: str) -> str:
    """Fingerprint of a Hugging Face folder's weights that does not read them in full: a digest of
    every tensor's name, dtype, shape, first and last bytes. Raises ValueError naming an unreadable
    file."""
    digest = hashlib.sha256()
    with WeightFiles(folder) as files:
        for name, stored in sorted(files.stored.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            digest.update(files.ends(name))
    return digest.hexdigest()[:24]


def stored_format(folder: str) -> Mapping[str, QuantizedWeight]:
    """How the folder stores its quantised weights, by name. Raises like `WeightFiles`."""
    with WeightFiles(folder) as files:
        return files.quantized


def _quantized_weights(
    stored: Mapping[str, StoredTensor], folder: str
) -> Mapping[str, QuantizedWeight]:
    how = folder_quantization(folder)
    if how is None:
        return {}
    plans = {
        name: TensorPlan(name, tensor.shape, _STORED_DTYPES[tensor.dtype])
        for name, tensor in stored.items()
        if tensor.dtype in _STORED_DTYPES
    }
    return find_quantized_weights(plans, how, folder)


def stored_tensors(file: int) -> dict[str, StoredTensor]:
    """Parse the header of a safetensors file that the library has validated: 8 bytes of length,
    then JSON."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = json.loads(os.pread(file, length, 8))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = StoredTensor(
                file, 8 + length + start, end - start, tuple(entry["shape"]), entry["dtype"]
            )
    return tensors


def _own_names(
    stored: Mapping[str, StoredTensor], folder: str, *, predicts: bool
) -> dict[str, StoredTensor]:
    """Rename the tensors to the names of the class in config.json, with one entry per expert."""
    path = Path(folder) / "config.json"
    config = read_json(path) if path.is_file() else {}
    named = config.get("architectures") if isinstance(config, dict) else None
    more = (PREDICTION_LAYERS,) if predicts else ()
    if named == [KIMI_LINEAR]:
        return {published_name(name): tensor for name, tensor in stored.items()}
    if named == [deepseek_v4.DEEPSEEK_V4]:
        return {deepseek_v4.published_name(name): tensor for name, tensor in stored.items()}
    if named == [GEMMA4]:  # written as they are read
        return dict(stored)
    if named == [GEMMA3]:
        return {with_vision_model(name): tensor for name, tensor in stored.items()}
    if named == [QWEN3_VL_MOE]:  # either order of dimensions; see `as_published`
        return _inputs_first(stored, config["text_config"]["hidden_size"])
    if not isinstance(named, list) or set(map(str, named)) not in TEXT_ONLY:
        return _each_expert(stored, (f"{LANGUAGE_MODEL}layers.", *more))
    moved = {name.replace(LANGUAGE_MODEL, "model.", 1): tensor for name, tensor in stored.items()}
    return _each_expert(moved, ("model.layers.", *more))


def _inputs_first(stored: Mapping[str, StoredTensor], hidden: int) -> dict[str, StoredTensor]:
    """The tensors of all experts as [experts, in, out], whichever order the file has. A layer has
    the order of that of its two tensors which is not square."""
    tensors = dict(stored)
    for name, up in stored.items():
        block, _, last = name.rpartition(".")
        down = stored.get(f"{block}.down_proj")
        if last != "gate_up_proj" or down is None or not len(up.shape) == len(down.shape) == 3:
            continue
        square = up.shape[1] == up.shape[2]
        if down.shape[1] == hidden if square else up.shape[2] == hidden:
            tensors[name] = dataclasses.replace(up, swapped=True)
            tensors[f"{block}.down_proj"] = dataclasses.replace(down, swapped=True)
    return tensors


def _each_expert(
    stored: Mapping[str, StoredTensor], layers: tuple[str, ...]
) -> dict[str, StoredTensor]:
    """Split Qwen3.5's tensors of all experts of a layer [experts, rows, columns], gate stacked on
    up, into entries under the names that other files have."""
    tensors = {}
    for name, tensor in stored.items():
        block, _, last = name.rpartition(".")
        is_fused = name.startswith(layers) and block.endswith(".experts")
        if not is_fused or last not in FUSED or len(tensor.shape) != 3:
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        pairs = itertools.product(range(experts), FUSED[last])
        parts = [f"{block}.{expert}.{projection}.weight" for expert, projection in pairs]
        size = tensor.size // len(parts)
        shape = (rows // len(FUSED[last]), columns)
        for number, part in enumerate(parts):
            start = tensor.start + number * size
            tensors[part] = StoredTensor(tensor.file, start, size, shape, tensor.dtype)
    return tensors


def _read_into(tensor: Tensor, file: int, position: int) -> None:
    """Fill a contiguous tensor from the file, starting at byte `position`. Raises ValueError if the
    file ends early."""
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
    """The safetensors files of a Hugging Face folder: those listed in its index, otherwise
    model.safetensors."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = read_json(index)["weight_map"]
            names = sorted(set(weight_map.values()))
            outside = [n for n in names if Path(n).name != n or n in ("", ".", "..")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index} is not an index of safetensors files: {error or error!r}"
            ) from error
        if outside:
            raise ValueError(
                f"{index} names {outside[0]!r}, which is not a file of this folder; correct it, or "
                "copy the file there"
            )
        paths = [folder / name for name in names]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(f"{index} names files that are not there: {listed(absent)}")
        if SINGLE not in names and (folder / SINGLE).is_file():
            raise ValueError(
                f"{folder} holds two models: {SINGLE}, which transformers reads, and the files of "
                f"{INDEX}; remove the older one"
            )
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ValueError(
        f"{folder}: no {SINGLE} and no {INDEX} in this folder; other formats are not supported "
        "(save the model with safetensors)"
    )


def listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    omitted = len(ordered) - MAX_NAMED
    return ", ".join(ordered[:MAX_NAMED]) + (f" and {omitted} more" if omitted > 0 else "")
