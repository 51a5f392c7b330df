"""The `quantization_config` of config.json: the storage format of the weights.

Formats: fp8 as published by DeepSeek (`quant_method` "fp8"); float-quantized and pack-quantized of
compressed-tensors; MXFP4 (OCP Microscaling Formats v1.0) as in gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_like.checkpoints.files import read_json

SUPPORTED = (
    "supported are: quant_method fp8 (fmt e4m3, with weight_block_size or one scale a tensor); "
    "compressed-tensors (format float-quantized or naive-quantized with 8-bit floats, or "
    "pack-quantized with symmetric 4- or 8-bit integers); mxfp4"
)
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage format of quantised weights [rows, columns]."""

    # e4m3 bytes, integers of `bits` bits packed into int32, or MXFP4
    kind: Literal["fp8", "packed", "mxfp4"]
    block: tuple[int, int]  # rows and columns that share a scale; 0: all
    # possible suffixes of the scales' name, which replace ".weight" in the name of the weight
    scales: tuple[str, ...]
    bits: int = 8
    power_of_two: bool = False  # whether scales are powers of two


def folder_quantization(folder: str) -> Quantization | None:
    """The format of a folder's weights; None without a config.json, e.g. for an adapter. Raises as
    `read_quantization`, naming the file."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        config = read_json(path)
        text = config.get("text_config") or {}
        key = "quantization_config"
        return read_quantization(config.get(key) or text.get(key))
    except (ValueError, OSError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def has_quantized_weights(folder: str | None) -> bool:
    try:
        return folder is not None and folder_quantization(folder) is not None
    except ValueError:  # which read_hf_model reports
        return False


def read_quantization(given: Mapping[str, object] | None) -> Quantization | None:
    """Parse a `quantization_config`; None if weights are not quantised. Raises ValueError naming
    the unsupported value and the legal ones."""
    if not given:
        return None
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "mxfp4": _mxfp4}
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise _unsupported("quant_method", method)
    return readers[method](given)


def _unsupported(key: str, value: object) -> ValueError:
    return ValueError(
        f"quantization_config: {key} {value!r:.200} is not supported; {SUPPORTED}; or use the "
        "unquantised model"
    )


def _fp8(given: Mapping[str, object]) -> Quantization:
    if given.get("fmt") not in ("e4m3", "float8_e4m3fn", None):
        raise _unsupported("fmt", given["fmt"])
    block = given.get("weight_block_size")
    scale_format = given.get("scale_fmt")
    if scale_format not in (None, "float", "ue8m0"):
        raise _unsupported("scale_fmt", scale_format)
    return Quantization(
        "fp8",
        (0, 0) if block is None else _block("weight_block_size", block),
        ("weight_scale_inv", "weight_scale"),
        power_of_two=scale_format == "ue8m0",
    )


def _mxfp4(given: Mapping[str, object]) -> Quantization:
    return Quantization("mxfp4", (1, 32), ("_scales",), bits=4)


def _compressed_tensors(given: Mapping[str, object]) -> Quantization:
    scheme = _only_scheme(given)
    kind = scheme.get("type")
    bits = scheme.get("num_bits")
    packed = given.get("format") == PACKED_FORMAT
    if not packed and given.get("format") not in FLOAT_FORMATS:
        raise _unsupported("format", given.get("format"))
    if (kind, bits) not in ([("int", 4), ("int", 8)] if packed else [("float", 8)]):
        raise _unsupported("weights", f"{bits}-bit {kind}")
    if scheme.get("symmetric") is not True:
        raise _unsupported("symmetric", scheme.get("symmetric"))
    if scheme.get("actorder") in ("group", True):
        raise _unsupported("actorder", scheme["actorder"])
    block = _strategy(scheme)
    return Quantization(
        "packed" if packed else "fp8", block, ("weight_scale",), bits=4 if bits == 4 else 8
    )


def _only_scheme(given: Mapping[str, object]) -> Mapping[str, object]:
    """The scheme of the weights, which must be the same for all groups of modules."""
    groups = given.get("config_groups")
    schemes: list[Any] = []
    if isinstance(groups, Mapping):
        schemes = [g.get("weights") if isinstance(g, Mapping) else None for g in groups.values()]
    if not schemes or not all(isinstance(s, Mapping) and s == schemes[0] for s in schemes):
        raise _unsupported("config_groups", groups)
    sparsity = given.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense"):
        raise _unsupported("sparsity_config", sparsity)
    first: Mapping[str, Any] = schemes[0]
    return first


def _strategy(scheme: Mapping[str, object]) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    strategy = scheme.get("strategy")
    group = scheme.get("group_size")
    if strategy == "group" and type(group) is int and group > 0:
        return 1, group
    if strategy == "block":
        return _block("block_structure", scheme.get("block_structure"))
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    raise _unsupported("strategy", f"{strategy} (group_size {group!r:.50})")


def _block(key: str, value: object) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(n) is int and n > 0 for n in value)
    ):
        raise _unsupported(key, value)
    return value[0], value[1]
