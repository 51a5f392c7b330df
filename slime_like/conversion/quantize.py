"""Write a quantised copy of a Hugging Face folder in bf16, one weight at a time.

The quantised weights are those of published folders (Qwen3-FP8, DeepSeek-V3.2, gpt-oss,
Kimi-K2-Thinking): the linear layers of attention and MLP with their experts. Embeddings, output
layer, norms, routers, small projections and towers stay as they are. The bits are those of a weight
update: the planned tensors are read like a folder's (weights/quantized.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.hf.quantization import read_quantization
from slime_like.checkpoints.files import read_json
from slime_like.checkpoints.replacement import folder_to_replace
from slime_like.config import ConfigError, Problem
from slime_like.conversion.network import Advance, Converted
from slime_like.conversion.shards import write_shards
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.hf_save import complete_folder
from slime_like.weights.quantized import (
    FP8,
    MX_COLUMNS,
    QuantizedWeight,
    find_quantized_weights,
)
from slime_like.weights.safetensors_reader import (
    TORCH_DTYPES,
    WeightFiles,
    listed,
    weights_digest,
)
from slime_like.weights.safetensors_writer import ShardPlan, plan_shards

INTEGER_BITS = {"int4": 4, "int8": 8}
MXFP4_ARCHITECTURE = "GptOssForCausalLM"
# as OpenAI publishes it
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
_LAYER = r"(?:mtp\.|backbone\.|(?:model\.)?(?:language_model\.)?(?:model\.)?)layers\.\d+\."
_EXPERT = r"(?:experts\.\d+\.|shared_experts?\.|shared_mlp\.)?"
_MLP = rf"(?:mlp|feed_forward|mixer|block_sparse_moe|shared_mlp)\.{_EXPERT}"
# of sparse attention's indexer: as in DeepSeek-V3.2
_ATTENTION = (
    r"self_attn\.(?:qkv_proj|out_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|indexer\.w(?:q_b|k))"
    r"|(?:self_attn|mixer)\.[qkvo]_proj"
)
_LINEAR_ATTENTION = r"linear_attn\.(?:in_proj_(?:qkvz|qkv|z)|out_proj)"
_LINEAR = rf"{_MLP}(?:gate_proj|up_proj|gate_up_proj|down_proj|w[123]|(?:in|out)put_linear)"
QUANTIZED = re.compile(rf"{_LAYER}(?:{_LINEAR}|{_ATTENTION}|{_LINEAR_ATTENTION})\.weight")
# Engines join these with others to one matrix, each of whole blocks. The number: of parts that the
# file has joined already.
_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), 1),
    **{"qkv_proj": 1, "gate_up_proj": 2, "input_linear": 2},
    **{"in_proj_qkvz": 1, "in_proj_qkv": 1, "in_proj_z": 1},
}
# Modules that engines load as one matrix. They refuse one that is quantised in part.
_LOADED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


@dataclass(frozen=True, slots=True)
class Method:
    """How to quantise."""

    name: str
    scales: str  # of fp8: float, or ue8m0 (powers of two in float32, as in DeepSeek-V3.1)
    block: tuple[int, int]  # of fp8: rows and columns per scale
    group: int  # of integers: columns per scale
    # modules to keep, by name or a part of it between dots
    excluded: tuple[str, ...]

    def stored(self, plan: TensorPlan) -> tuple[TensorPlan, ...]:
        """The tensors as which a weight is stored. Raises ConfigError if its size does not fit."""
        name = plan.name
        if self.name == "mxfp4":
            experts, columns, rows = plan.shape
            self._check(plan, columns % MX_COLUMNS == 0, f"groups of {MX_COLUMNS} input values")
            groups = columns // MX_COLUMNS
            return (
                TensorPlan(f"{name}_blocks", (experts, rows, groups, 16), torch.uint8),
                TensorPlan(f"{name}_scales", (experts, rows, groups), torch.uint8),
            )
        rows, columns = plan.shape
        if self.name == "fp8":
            high, wide = self.block
            module = name.split(".")[-2]
            fits = rows % (high * _JOINED.get(module, 1)) == 0 or module not in _JOINED
            self._check(plan, fits, f"--block-size {high} {wide}")
            grid = (-(-rows // high), -(-columns // wide))
            return (
                TensorPlan(name, plan.shape, FP8),
                TensorPlan(f"{name}_scale_inv", grid, torch.float32),
            )
        words = -(-columns * INTEGER_BITS[self.name] // 32)
        self._check(plan, columns % self.group == 0, f"--group-size {self.group}")
        return (
            TensorPlan(f"{name}_packed", (rows, words), torch.int32),
            TensorPlan(f"{name}_scale", (rows, columns // self.group), torch.bfloat16),
            TensorPlan(f"{name}_shape", (2,), torch.int64),
        )

    def config(self, weights: Collection[str], others: Collection[str]) -> dict[str, Any]:
        """`quantization_config` of a folder.

        Args:
            weights: Names of the quantised weights.
            others: Names of the other tensors.
        """
        if self.name == "mxfp4":
            return MXFP4_CONFIG
        kept = kept_modules(weights, others)
        if self.name == "fp8":
            scale_format = {"scale_fmt": "ue8m0"} if self.scales == "ue8m0" else {}
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                **scale_format,
                "modules_to_not_convert": list(kept),
            }
        scheme: dict[str, object] = {
            "actorder": None, "block_structure": None, "dynamic": False,
            "group_size": self.group, "num_bits": INTEGER_BITS[self.name], "observer": "minmax",
            "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
        }  # fmt: skip
        group = {
            "input_activations": None, "output_activations": None,
            "targets": ["Linear"], "weights": scheme,
        }  # fmt: skip
        # compressed-tensors compares whole names
        ignored = [
            name if whole else rf"re:(.*\.)?{re.escape(name.removeprefix('model.'))}\..*"
            for name, whole in kept.items()
        ]
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    def _check(self, plan: TensorPlan, fits: bool, what: str) -> None:
        if not fits:
            block = re.sub(_LAYER, "", plan.name).split(".")[0]
            raise _wrong(
                "--method",
                self.name,
                f"{plan.name} {list(plan.shape)} does not fit {what}, and an engine would refuse "
                "it; give another size where the method has one, or keep such modules with "
                f"--modules-to-not-convert {block}",
            )


def kept_modules(weights: Collection[str], others: Collection[str]) -> dict[str, bool]:
    """Modules without a quantised weight, the outermost of each: name -> whether it is a single
    layer, without modules inside.

    Args:
        weights: Names of the quantised weights.
        others: Names of the other tensors, of which only matrices matter.
    """
    inside = {above for name in weights for above in _above(name)}
    kept: dict[str, bool] = {}
    for name in others:
        modules = [above for above in _above(name) if above not in inside]
        if modules:
            kept[modules[0]] = len(modules) == 1 and kept.get(modules[0], True)
    return dict(sorted(kept.items()))


def _above(name: str) -> list[str]:
    """The modules that have a tensor, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def chosen(tensors: Mapping[str, TensorPlan], method: Method, architecture: str) -> list[str]:
    """Names of the weights to quantise. Raises ConfigError if there are none, or if the method
    has no form for them."""
    matrices = [name for name, plan in tensors.items() if len(plan.shape) == 2]
    if method.name == "mxfp4":
        if architecture != MXFP4_ARCHITECTURE:
            raise _wrong(
                "--method",
                "mxfp4",
                f"is the format of the experts of {MXFP4_ARCHITECTURE}, and this model is "
                f"{architecture}; use fp8, int4 or int8",
            )
        names = [n for n in tensors if n.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    else:
        stacked = [n for n, plan in tensors.items() if _all_experts(plan)]
        if stacked:
            raise _wrong(
                "--method",
                method.name,
                f"{stacked[0]} {list(tensors[stacked[0]].shape)} is all experts of a layer in one "
                "tensor, for which only mxfp4 (of gpt-oss) has a form",
            )
        names = [n for n in matrices if QUANTIZED.fullmatch(n)]
        # Engines multiply with parts of multi-head latent attention's matrices, which they do not
        # unpack.
        if method.name in INTEGER_BITS and any(".kv_b_proj." in name for name in names):
            names = [name for name in names if ".self_attn." not in name]
    for module in method.excluded:
        if not any(_excludes(module, name) for name in names):
            raise _wrong(
                "--modules-to-not-convert",
                module,
                "is no module that would be quantised, nor a part of its name between dots; such "
                f"weights are {listed(names)}",
            )
    kept = [name for name in names if any(_excludes(e, name) for e in method.excluded)]
    names = [name for name in names if name not in set(kept)]
    _check_whole(kept, names, method)
    if not names:
        raise _wrong(
            "--method",
            method.name,
            f"has nothing to quantise in a {architecture}, whose matrices are {listed(matrices)}",
        )
    return names


def _check_whole(kept: Sequence[str], quantized: Sequence[str], method: Method) -> None:
    """Raise ConfigError if --modules-to-not-convert leaves a part of what engines load as one."""
    others = {_loaded_as(name): name for name in quantized}
    for name in kept:
        if (other := others.get(_loaded_as(name))) is not None:
            raise _wrong(
                "--modules-to-not-convert",
                " ".join(method.excluded),
                f"leaves {name} as it is and quantises {other}, which engines load as one matrix "
                "of one format; name all of it, or nothing",
            )


def _loaded_as(name: str) -> str:
    """A name for all weights that engines load together: all experts of a layer, or parts of a
    matrix."""
    module, experts, _ = name.partition(".experts.")
    if experts:
        return f"{module}.experts"
    module, _, part = name.removesuffix(".weight").rpartition(".")
    return f"{module}.{next((each for each in _LOADED_TOGETHER if part in each), part)}"


def _all_experts(plan: TensorPlan) -> bool:
    is_convolution = len(plan.shape) == 3 and plan.shape[1] == 1
    in_experts = any(f".{m}." in plan.name for m in ("experts", "block_sparse_moe", "moe"))
    return len(plan.shape) == 3 and in_experts and not is_convolution


def _excludes(module: str, name: str) -> bool:
    """Whether a tensor is of a module, which is named from the start or by a part of it."""
    return f".{module}." in f".{name}"


class QuantizedCopy:
    """The tensors of a quantised copy of a folder.

    Raises ConfigError, naming the tensor, if the source is quantised, or the method does not fit.
    """

    def __init__(self, source: str, method: Method) -> None:
        self._source = source
        config = read_json(Path(source) / "config.json")
        text = config.get("text_config") or {}
        if given := config.get("quantization_config") or text.get("quantization_config"):
            raise _wrong(
                "--hf-checkpoint",
                source,
                f"is already quantised (quant_method {given.get('quant_method')}); give the "
                "folder of its bf16 weights",
            )
        with WeightFiles(source, predicts=True) as files:
            tensors = {
                name: TensorPlan(name, stored.read_shape, files.stored_dtype(name))
                for name, stored in files.stored.items()
            }
        names = chosen(tensors, method, str((config.get("architectures") or ["?"])[0]))
        for name in names:
            if tensors[name].dtype not in TORCH_DTYPES.values():
                raise _wrong(
                    "--hf-checkpoint",
                    source,
                    f"is already quantised: {name} is {tensors[name].dtype}; give the folder of "
                    "its bf16 weights",
                )
        parts = {name: method.stored(tensors[name]) for name in names}
        # an output tensor with the tensor that it is made of, the parts of a weight side by side
        self.tensors: dict[str, tuple[str, TensorPlan]] = {}
        for name, plan in tensors.items():
            for part in parts.get(name, (plan,)):
                self.tensors[part.name] = (name, part)
        matrices = [n for n, plan in tensors.items() if n not in parts and len(plan.shape) > 1]
        self.config = method.config(names, matrices)
        form = read_quantization(self.config)
        assert form is not None
        self.quantized: Mapping[str, QuantizedWeight] = find_quantized_weights(
            {plan.name: plan for _, plan in self.tensors.values()}, form, source
        )
        assert self.quantized.keys() == parts.keys()

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for _, plan in self.tensors.values())

    def stream(self, file: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file. A weight is read once for all of its tensors that are in the
        file. Raises ValueError for a weight with numbers that are not finite."""
        with WeightFiles(self._source, predicts=True) as files:
            for name, group in groupby(file.tensors, lambda plan: self.tensors[plan.name][0]):
                encoded = {name: files.read_stored(name)}
                if name in self.quantized:
                    if not encoded[name].isfinite().all():
                        raise ValueError(f"{self._source}: {name} has numbers that are not finite")
                    encoded = self.quantized[name].encode(encoded[name])
                for plan in group:
                    yield plan.name, encoded[plan.name]
                del encoded  # freed before the next weight is read


def quantize_folder(
    copy: QuantizedCopy,
    source: str,
    output: str,
    *,
    max_shard_bytes: int,
    workers: int = 1,
    advance: Advance = lambda size: None,
) -> Converted:
    """Write the copy at `output`; each of `workers` threads writes one file at a time and holds one
    weight. Raises ValueError or OSError; partial output is kept next to `output` for the next
    attempt."""
    folder = Path(output)
    shards = plan_shards((plan for _, plan in copy.tensors.values()), max_shard_bytes)

    def complete(partial: Path) -> None:
        complete_folder(partial, Path(source), shards, quantization=copy.config)

    kept = write_shards(
        folder,
        shards,
        weights_digest(source) + json.dumps(copy.config, sort_keys=True),
        copy.stream,
        complete,
        workers=workers,
        advance=advance,
    )
    return Converted(folder, copy.nbytes, len(shards), kept)


def check_output(output: str) -> None:
    """Raise ConfigError if there is something already, or a link to nothing."""
    folder = Path(output)
    try:
        folder_to_replace(folder)
    except ValueError as error:
        raise _wrong("--output", output, str(error)) from error
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _wrong("--output", output, "exists; remove it, or name another folder")


def _wrong(flag: str, value: str, reason: str) -> ConfigError:
    return ConfigError([Problem(flag, value, reason)])
