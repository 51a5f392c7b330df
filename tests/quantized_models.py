"""Quantised weights of every format, built from bits, with their values computed by plain float64
loops: the reference for slime_like/weights/quantized.py."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Stored = dict[str, Tensor]  # by what follows the weight's name without its "weight"


def e4m3(byte: int) -> float:
    """The number of eight bits: sign, four of the exponent (bias 7), three of the mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = math.ldexp(1 + mantissa / 8, exponent - 7) if exponent else math.ldexp(mantissa, -9)
    return -size if sign else size


def fp8_weight(
    shape: tuple[int, int], block: tuple[int, int], draw: random.Random, scales_as: str = "grid"
) -> tuple[Stored, Tensor]:
    """
    Args:
        block: 0 for all rows or columns.
        scales_as: Grid [rows, columns] of scales, flat [rows], or scalar [].
    """
    (rows, columns), (high, wide) = shape, [b or n for b, n in zip(block, shape, strict=True)]
    codes = [[draw.choice(LEGAL_BYTES) for _ in range(columns)] for _ in range(rows)]
    grid = torch.tensor(
        [[draw.uniform(1e-3, 2e-3) for _ in range(-(-columns // wide))] for _ in range(-(-rows // high))]
    )  # fmt: skip
    scales = grid.tolist()  # float32 as float64
    values = [
        [e4m3(codes[r][c]) * scales[r // high][c // wide] for c in range(columns)]
        for r in range(rows)
    ]
    form = {"grid": grid.shape, "flat": (grid.shape[0],), "scalar": ()}[scales_as]
    stored = {
        "weight": torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scale": grid.view(form),
    }
    return stored, torch.tensor(values, dtype=torch.float64)


def fp8_matrix(
    shape: tuple[int, int], draw: random.Random, block: tuple[int, int] = (8, 8)
) -> tuple[Stored, Tensor]:
    """As DeepSeek's files have it, with numbers of the size of weights."""
    stored, value = fp8_weight(shape, block, draw)
    return {"weight": stored["weight"], "weight_scale_inv": stored["scale"] / 16}, value / 16


LEGAL_BYTES = [byte for byte in range(256) if byte & 127 != 127]


def packed_weight(
    shape: tuple[int, int], group: int, bits: int, draw: random.Random
) -> tuple[Stored, Tensor]:
    """group: columns of a scale; 0: all."""
    rows, columns = shape
    wide, half, in_word = group or columns, 2 ** (bits - 1), 32 // bits
    codes = [[draw.randrange(-half, half) for _ in range(columns)] for _ in range(rows)]
    words = [
        [
            sum(code + half << bits * i for i, code in enumerate(row[c : c + in_word]))
            for c in range(0, columns, in_word)
        ]
        for row in codes
    ]
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in words]
    scales = torch.tensor(
        [[draw.uniform(0.01, 0.02) for _ in range(columns // wide)] for _ in range(rows)]
    ).bfloat16()
    numbers = scales.tolist()
    values = [[codes[r][c] * numbers[r][c // wide] for c in range(columns)] for r in range(rows)]
    stored = {
        "weight_packed": torch.tensor(signed, dtype=torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    return stored, torch.tensor(values, dtype=torch.float64)


def mxfp4_experts(
    experts: int, rows: int, groups: int, draw: random.Random
) -> tuple[Stored, Tensor]:
    """Of the weight [experts, 32 * groups, rows]."""
    blocks = torch.zeros(experts, rows, groups, 16, dtype=torch.uint8)
    scales = torch.zeros(experts, rows, groups, dtype=torch.uint8)
    weight = torch.zeros(experts, 32 * groups, rows, dtype=torch.float64)
    for e in range(experts):
        for r in range(rows):
            for g in range(groups):
                exponent = draw.randrange(0, 255)
                scales[e, r, g] = exponent
                for i in range(16):
                    low, high = draw.randrange(16), draw.randrange(16)
                    blocks[e, r, g, i] = low | high << 4
                    for place, code in ((2 * i, low), (2 * i + 1, high)):
                        size = math.ldexp(E2M1[code & 7], exponent - 127)
                        weight[e, 32 * g + place, r] = -size if code & 8 else size
    return {"_blocks": blocks, "_scales": scales}, weight


def fp8_config(block: tuple[int, int] | None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block), **more,
    }  # fmt: skip


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    scheme = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 4,
        "observer": "minmax", "strategy": "group", "symmetric": True, "type": "int", **weights,
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": scheme}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def add_untrained_layer(plain: str, layers: int) -> None:
    """To the model in `plain`, which has so many layers: one that predicts a token more."""
    path, config = Path(plain) / "model.safetensors", Path(plain) / "config.json"
    prefix = f"model.layers.{layers}"
    more = {
        f"{prefix}.eh_proj.weight": torch.randn(32, 64),
        f"{prefix}.enorm.weight": torch.randn(32),
        f"{prefix}.mlp.experts.0.up_proj.weight": torch.randn(24, 32),
    }
    save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    given = {**json.loads(config.read_text()), "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(given))


def write_model(
    plain: str,
    folder: Path,
    config: dict[str, Any],
    make: Callable[[tuple[int, int], random.Random], tuple[Stored, Tensor]],
    is_quantized: Callable[[str], bool],
) -> tuple[str, str]:
    """Of the model in `plain` one with other numbers, whose chosen matrices are quantised, and the
    same one with what these stand for; their folders. make: a stored matrix of a shape, by what
    follows its name without "weight", and its value."""
    draw = random.Random(7)
    stored: Stored = {}
    values: Stored = {}
    for name, tensor in load_file(Path(plain) / "model.safetensors").items():
        if name.endswith(".weight") and tensor.dim() == 2 and is_quantized(name):
            parts, value = make((tensor.shape[0], tensor.shape[1]), draw)
            stem = name.removesuffix("weight")
            stored |= {stem + suffix: part for suffix, part in parts.items()}
            values[name] = value.float()
        else:
            stored[name] = values[name] = tensor
    for where, tensors in ((folder / "quantized", stored), (folder / "plain", values)):
        shutil.copytree(plain, where)
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    path = folder / "quantized" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return str(folder / "quantized"), str(folder / "plain")
