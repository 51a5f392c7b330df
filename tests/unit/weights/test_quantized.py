"""slime_like/weights/quantized.py and arguments/hf/quantization.py against plain loops in float64:
what stored bits stand for, and what is stored of a new value."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from arguments.hf.quantization import read_quantization
from slime_like.weights.quantized import QuantizedWeight, ScaledMatrix
from slime_like.weights.safetensors_reader import WeightFiles, stored_format
from tests.paths import ROOT
from tests.quantized_models import (
    Stored,
    compressed_config,
    fp8_config,
    fp8_weight,
    mxfp4_experts,
    packed_weight,
)

DRAW = random.Random(1)
Made = tuple[dict[str, Any], Stored, Tensor]


def _fp8(
    config: dict[str, Any],
    scale: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    scales_as: str = "grid",
) -> Made:
    stored, weight = fp8_weight(shape, block, DRAW, scales_as)
    return config, {"x.weight": stored["weight"], f"x.{scale}": stored["scale"]}, weight


def _packed(shape: tuple[int, int], group: int, bits: int) -> Made:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    stored, weight = packed_weight(shape, group, bits, DRAW)
    config = compressed_config("pack-quantized", num_bits=bits, **strategy)
    return config, {f"x.{suffix}": tensor for suffix, tensor in stored.items()}, weight


def _mxfp4() -> Made:
    stored, weight = mxfp4_experts(3, 5, 2, DRAW)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return config, {f"x.weight{suffix}": tensor for suffix, tensor in stored.items()}, weight


FLOAT = dict(type="float", num_bits=8)
FORMATS: dict[str, Callable[[], Made]] = {
    "fp8": lambda: _fp8(fp8_config((128, 128)), "weight_scale_inv", (130, 257), (128, 128)),
    "fp8-small": lambda: _fp8(fp8_config((8, 16)), "weight_scale_inv", (19, 50), (8, 16)),
    "fp8-of-one-block": lambda: _fp8(fp8_config((128, 128)), "weight_scale_inv", (5, 6), (0, 0)),
    "fp8-tensor": lambda: _fp8(fp8_config(None), "weight_scale_inv", (9, 7), (0, 0), "scalar"),
    "fp8-tensor-flat": lambda: _fp8(fp8_config(None), "weight_scale", (9, 7), (0, 0), "flat"),
    "float-channel": lambda: _fp8(
        compressed_config("float-quantized", strategy="channel", **FLOAT), "weight_scale", (9, 7), (1, 0)
    ),
    "float-channel-flat": lambda: _fp8(
        compressed_config("float-quantized", strategy="channel", **FLOAT), "weight_scale", (9, 7), (1, 0), "flat"
    ),
    "float-block": lambda: _fp8(
        compressed_config("float-quantized", strategy="block", block_structure=[4, 4], **FLOAT),
        "weight_scale", (9, 7), (4, 4),
    ),
    "int4": lambda: _packed((6, 96), 32, 4),
    "int4-of-part-of-a-word": lambda: _packed((6, 60), 12, 4),
    "int4-channel": lambda: _packed((6, 64), 0, 4),
    "int8": lambda: _packed((6, 64), 16, 8),
    "mxfp4": _mxfp4,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], stored: Stored) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(stored, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_read_to_the_bit(name: str, tmp_path: Path) -> None:
    """Whole and in parts, along either dimension, and rounded once to a parameter's dtype; a plain
    tensor next to it stays what it is."""
    config, stored, exact = FORMATS[name]()
    plain = torch.randn(3, 3).bfloat16()
    folder = write(
        tmp_path, config, {**stored, "norm.weight": plain, "x.input_scale": torch.ones(1)}
    )
    weight = exact.float()
    with WeightFiles(folder) as files:
        assert files.names == {"x.weight", "norm.weight"}
        assert files.shape("x.weight") == weight.shape and files.dtype("x.weight") == "F32"
        assert torch.equal(files.read("norm.weight", 0, 0, 3), plain)
        for dim in (0, 1):
            size = weight.shape[dim]
            for start, stop in ((0, size), (1, size - 1), (size // 2, size // 2 + 1)):
                part = weight.narrow(dim, start, stop - start)
                assert torch.equal(files.read("x.weight", dim, start, stop), part)
                rounded = torch.empty(part.shape, dtype=torch.bfloat16)
                files.read_into(rounded, "x.weight", dim, start, stop)
                assert torch.equal(rounded, part.bfloat16())


def test_parts_of_a_large_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That begin and end within blocks."""
    from slime_like.weights import quantized

    monkeypatch.setattr(quantized, "CHUNK_ELEMENTS", 150)  # three rows
    config, stored, exact = FORMATS["fp8-small"]()
    with WeightFiles(write(tmp_path, config, stored)) as files:
        assert torch.equal(files.read("x.weight", 0, 2, 19), exact.float()[2:])
        assert torch.equal(files.read("x.weight", 1, 3, 40), exact.float()[:, 3:40])


def decoded(coded: QuantizedWeight, stored: Stored) -> Tensor:
    def read(name: str, first: int, last: int) -> Tensor:
        tensor = stored[name]
        return (tensor if tensor.dim() else tensor.view(1))[first:last]

    return coded.decode(read, 0, coded.shape[0])


def half_steps(coded: QuantizedWeight, stored: Stored, weight: Tensor) -> Tensor:
    """Half the distance between the numbers around each weight that the stored scales give."""
    scales = next(t for name, t in stored.items() if "scale" in name).double()
    rows, columns = coded.tile  # type: ignore[attr-defined]
    grid = scales.reshape(-(-coded.shape[0] // rows), -1)
    steps = grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    steps = steps[: coded.shape[0], : coded.shape[1]]
    if "packed" in " ".join(stored):
        return steps / 2
    exponent = torch.frexp(weight.double().abs() / steps)[1] - 1  # of 1.xxx
    return torch.ldexp(steps, exponent.clamp(min=-6) - 4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4"])
def test_a_new_value_is_stored_within_half_a_step(name: str, seed: int, tmp_path: Path) -> None:
    """In tensors of the names, shapes and dtypes that were there; a value that was stored is stored
    again as what it was."""
    config, stored, exact = FORMATS[name]()
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    torch.manual_seed(seed)
    weight = torch.randn(exact.shape) * 10.0 ** (2 * seed - 3)
    weight[0] = 0.0
    if seed == 2:
        weight[:] = -weight.abs()
    found = coded.encode(weight)
    assert [plan.name for plan in coded.stored] == sorted(
        found, key=lambda n: [p.name for p in coded.stored].index(n)
    )
    for key, tensor in stored.items():
        assert (found[key].shape, found[key].dtype) == (tensor.shape, tensor.dtype), key
    back = decoded(coded, found)
    # the scale is rounded to its dtype too
    assert ((back - weight).abs() <= 1.01 * half_steps(coded, found, weight)).all()
    again = decoded(coded, coded.encode(back))
    assert torch.allclose(again, back, rtol=1e-6, atol=0)
    if "packed" in " ".join(stored):
        assert torch.equal(again, back)


def test_stored_integers_are_stored_again_as_they_were(tmp_path: Path) -> None:
    """Through bf16, in which a run has them; whichever end of the range the scale was made for."""
    for low, high in ((-8, 7), (-7, 7), (-8, 3), (-7, 5)):
        config, stored, _ = _packed((16, 64), 32, 4)
        codes = torch.randint(low, high + 1, (16, 64))
        codes[:, ::32], codes[:, 1::32] = low, high
        words = (codes + 8).view(16, 8, 8) << torch.arange(0, 32, 4)
        words = words.sum(-1)
        stored["x.weight_packed"] = torch.where(words < 2**31, words, words - 2**32).int()
        coded = stored_format(write(tmp_path, config, stored))["x.weight"]
        weight = decoded(coded, stored)
        assert torch.equal(decoded(coded, coded.encode(weight)), weight)
        again = decoded(coded, coded.encode(weight.bfloat16()))
        assert torch.allclose(again, weight, rtol=2**-7, atol=0)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    config, stored, _ = _fp8(
        fp8_config((8, 8), scale_fmt="ue8m0"), "weight_scale_inv", (16, 16), (8, 8)
    )
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    weight = torch.randn(16, 16)
    weight[:8, :8] *= 448 / weight[:8, :8].abs().max()  # its scale is 1
    found = coded.encode(weight)
    scales = found["x.weight_scale_inv"]
    assert (torch.frexp(scales)[0] == 0.5).all() and scales[0, 0] == 1.0
    back = decoded(coded, found)
    assert ((back - weight).abs() <= half_steps(coded, found, weight)).all()
    assert torch.equal(decoded(coded, coded.encode(back)), back)


def test_the_smallest_numbers_have_a_scale(tmp_path: Path) -> None:
    """Whose reciprocal is a number."""
    config, stored, _ = FORMATS["fp8-small"]()
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    weight = torch.zeros(19, 50)
    weight[0, 0] = 1e-38
    weight[8, 0] = 1.0
    found = coded.encode(weight)
    back = decoded(coded, found)
    assert bool(torch.isfinite(back).all()) and back[8, 0] == 1.0 and back[0, 1] == 0.0
    assert float(back[0, 0]) == pytest.approx(1e-38, rel=0.07)


def nearest_mx(numbers: list[float]) -> tuple[int, list[float]]:
    """The exponent and the values of a group of 32 numbers, by trying all."""
    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    largest = max(map(abs, numbers))
    exponent = next((e for e in range(-127, 128) if 6.0 * 2.0**e >= largest), 127)
    found = []
    for number in numbers:
        size = min(sizes, key=lambda size: (abs(size * 2.0**exponent - abs(number)), size))
        found.append(math.copysign(size * 2.0**exponent, number))
    return exponent, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_values_in_mxfp4_are_the_nearest(dtype: torch.dtype, tmp_path: Path) -> None:
    config, stored, _ = _mxfp4()
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    torch.manual_seed(0)
    weight = (torch.randn(3, 64, 5) * 10.0 ** torch.randint(-6, 6, (3, 1, 5))).to(dtype)
    weight[0, :32, 0] = 0
    weight[0, :32, 1] = torch.arange(32) / 4  # ties, and a largest value between two powers
    weight[0, 0, 2] = 6 * 2.0**4  # at which a scale just fits
    found = coded.encode(weight)
    for name, tensor in stored.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    back = decoded(coded, found)
    for expert in range(3):
        for row in range(5):
            for group in range(2):
                columns = slice(32 * group, 32 * group + 32)
                numbers = weight[expert, columns, row].tolist()
                exponent, values = nearest_mx(numbers)
                assert int(found["x.weight_scales"][expert, row, group]) == exponent + 127
                assert back[expert, columns, row].tolist() == values
    assert torch.equal(decoded(coded, coded.encode(back)), back)


def test_stored_mxfp4_is_stored_again_as_what_it_was(tmp_path: Path) -> None:
    """Through bf16, which has every number of the format."""
    config, stored, weight = _mxfp4()
    stored["x.weight_scales"].clamp_(3, 250)  # twice the largest number is one, too
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    weight = decoded(coded, stored)
    assert torch.equal(decoded(coded, coded.encode(weight.bfloat16())), weight)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_none_in_mxfp4(value: float, tmp_path: Path) -> None:
    config, stored, _ = _mxfp4()
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    weight = torch.ones(3, 64, 5)
    weight[1, 40, 2] = value
    found = coded.encode(weight)
    assert (found["x.weight_scales"] == 255).nonzero().tolist() == [[1, 2, 1]]
    with pytest.raises(ValueError, match="which are no numbers"):
        decoded(coded, found)


@pytest.mark.parametrize("scales", ["float", "powers", "e8m0"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("fp8", "mxfp4")])
def test_what_is_no_number_is_none_in_fp8_and_integers(
    name: str, value: float, scales: str, tmp_path: Path
) -> None:
    """Nor is any other of its block; those of other blocks are what they are without it."""
    config, stored, _ = FORMATS[name]()
    if scales != "float" and config["quant_method"] == "fp8":
        config["scale_fmt"] = "ue8m0"
    if scales == "e8m0" and name.startswith("f"):
        stored = {
            key: tensor if tensor.dtype == torch.float8_e4m3fn else as_powers(tensor)
            for key, tensor in stored.items()
        }
    coded = stored_format(write(tmp_path, config, stored))["x.weight"]
    assert isinstance(coded, ScaledMatrix)
    weight = torch.ones(coded.shape)
    clean = decoded(coded, coded.encode(weight))
    weight[3, 5] = value
    back = decoded(coded, coded.encode(weight))
    assert bool(back[3, 5].isnan())
    blocks = torch.zeros(coded.shape, dtype=torch.bool)
    rows, columns = coded.tile
    top = 3 // rows * rows
    left = 5 // columns * columns
    blocks[top : top + rows, left : left + columns] = True
    assert torch.equal(back.isnan(), blocks)
    assert torch.equal(back[~blocks], clean[~blocks])


def as_powers(scales: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(scales), torch.frexp(scales)[1]).to(torch.float8_e8m0fnu)


def test_mxfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config, stored, _ = _mxfp4()
    stored["x.weight_scales"][1, 0, 0] = 255
    with WeightFiles(write(tmp_path, config, stored)) as files:
        with pytest.raises(ValueError, match=r"x\.weight_scales"):
            files.read("x.weight", 0, 0, 3)
        files.read("x.weight", 0, 2, 3)  # another expert


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, ""),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        (fp8_config((128, 128), fmt="e5m2"), "fmt 'e5m2'"),
        (fp8_config((128, 128), scale_fmt="int"), "scale_fmt 'int'"),
        (fp8_config((128, 128), weight_block_size=[128]), "weight_block_size [128]"),
        (fp8_config((128, 0)), "weight_block_size [128, 0]"),
        (compressed_config("marlin-24", group_size=32), "format 'marlin-24'"),
        (compressed_config("pack-quantized", group_size=32, num_bits=3), "weights '3-bit int'"),
        (compressed_config("float-quantized", group_size=32), "weights '4-bit int'"),
        (compressed_config("pack-quantized", group_size=32, symmetric=False), "symmetric False"),
        (compressed_config("pack-quantized", group_size=32, actorder="group"), "actorder 'group'"),
        (compressed_config("pack-quantized", group_size=0), "strategy 'group (group_size 0)'"),
        (compressed_config("pack-quantized") | {"config_groups": {}}, "config_groups {}"),
        (compressed_config("pack-quantized") | {"config_groups": {"a": 1}}, "config_groups"),
        (
            compressed_config("pack-quantized", group_size=8)
            | {"sparsity_config": {"format": "24"}},
            "sparsity_config",
        ),
    ],
)
def test_formats_that_are_not_read(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    if not config:
        assert read_quantization(config) is None
        return
    with pytest.raises(ValueError) as caught:
        read_quantization(config)
    assert message in str(caught.value) and "compressed-tensors (format" in str(caught.value)
    folder = write(tmp_path, config, {"x.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError) as caught:
        WeightFiles(folder)
    assert message in str(caught.value) and folder in str(caught.value)


BROKEN: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("fp8-small", {"x.weight_scale_inv": None}, "x.weight_scale_inv or x.weight_scale"),
    ("fp8-small", {"x.weight_scale_inv": torch.ones(3, 3)}, "x.weight_scale_inv"),
    ("fp8-small", {"x.weight_scale_inv": torch.ones(3, 4).int()}, "no scales"),
    ("fp8-tensor", {"x.weight_scale_inv": torch.ones(2)}, "must be [1, 1]"),
    ("fp8-small", {"x.weight": torch.zeros(4, dtype=torch.float8_e4m3fn)}, "two dimensions"),
    ("int4", {"x.weight_scale": None}, "x.weight_scale"),
    ("int4", {"x.weight_shape": None}, "x.weight_shape"),
    ("int4", {"x.weight_shape": torch.ones(3).int()}, "two integers"),
    ("int4", {"x.weight_scale": torch.ones(6, 4)}, "other columns"),
    ("int4", {"x.weight_scale": torch.ones(5, 3)}, "must be [6, 3]"),
    ("int4", {"x.weight_zero_point": torch.ones(6, 3)}, "weight_zero_point"),
    ("int4", {"x.weight_g_idx": torch.ones(96).int()}, "weight_g_idx"),
    ("int4", {"x.weight_packed": torch.ones(6, 12)}, "int32"),
    ("mxfp4", {"x.weight_scales": None}, "x.weight_scales"),
    ("mxfp4", {"x.weight_scales": torch.ones(3, 5, 3).byte()}, "[3, 5, 2]"),
    ("mxfp4", {"x.weight_blocks": torch.ones(3, 5, 2, 8).byte()}, "[experts, rows, groups, 16]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BROKEN)
def test_broken_files_are_refused_by_tensor(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """With the folder and what is supported."""
    config, stored, _ = FORMATS[name]()
    given = {key: t for key, t in (stored | changes).items() if t is not None}
    folder = write(tmp_path, config, given)
    with pytest.raises(ValueError) as caught:
        WeightFiles(folder)
    words = str(caught.value)
    assert message in words and folder in words and "x.weight" in words and "supported are" in words


def test_a_weight_that_is_not_of_its_shape(tmp_path: Path) -> None:
    config, stored, _ = FORMATS["int4"]()
    stored["x.weight_shape"] = torch.tensor([6, 95])
    with (
        WeightFiles(write(tmp_path, config, stored)) as files,
        pytest.raises(ValueError, match=r"x\.weight_shape is \[6, 95\]"),
    ):
        files.read("x.weight", 0, 0, 6)


@pytest.mark.extended
def test_memory_of_a_gigabyte(tmp_path: Path) -> None:
    """Less than one of its 17 weights in bf16, however many there are."""
    script = ROOT / "benchmarks/bench_quantized_load.py"
    command = [sys.executable, str(script), "--gb", "1", "--json", str(tmp_path / "found.json")]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["stored"] > 0.95e9 and found["peak"] < found["tensor"]
