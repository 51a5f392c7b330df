"""What weight updates send quantised is what the engines' own quantisers make of the same weights,
bit for bit. These are plain torch, and run in the engines' environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_like.weights.quantized import Fp8Matrix, MxExperts
from tests.sglang.conftest import PYTHON
from tests.vllm.conftest import PYTHON as VLLM_PYTHON

SGLANG_QUANTISERS = """
import sys
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8
from sglang.srt.layers.quantization.mxfp4_tensor import MXFP4QuantizeUtil

class Quantised(MXFP4QuantizeUtil):
    def __init__(self, shape, dtype, data):
        self.data = data

weights = load_file(sys.argv[1])
codes, scales = per_block_cast_to_fp8(weights["matrix"])
expert = weights["expert"].float()
packed, exponents = Quantised.quantize(expert, 32)
save_file({
    "ue8m0.codes": codes, "ue8m0.scales": scales,
    "mx.codes": packed.data, "mx.scales": exponents.view(len(expert), -1),
}, sys.argv[2])
"""
VLLM_QUANTISERS = """
import sys
from safetensors.torch import load_file, save_file
from vllm.utils.deep_gemm import per_block_cast_to_fp8

matrix = load_file(sys.argv[1])["matrix"]
found = {}
for name, ue8m0 in (("float", False), ("ue8m0", True)):
    codes, scales = per_block_cast_to_fp8(matrix, [128, 128], ue8m0)
    found[f"{name}.codes"], found[f"{name}.scales"] = codes.contiguous(), scales.contiguous()
save_file(found, sys.argv[2])
"""


def weights() -> dict[str, Tensor]:
    """Blocks of very different sizes, the largest and the smallest of them in one row of blocks;
    zeros; and values in the middle between two codes."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(700, 1100, generator=generator)
    sizes = torch.randint(-3, 6, (6, 9), generator=generator)
    sizes = sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:700, :1100]
    matrix = matrix * 10.0**sizes
    matrix[5:9, ::3] = 0
    expert = torch.randn(40, 320, generator=generator)
    expert *= 10.0 ** torch.randint(-6, 6, (40, 1), generator=generator)
    expert[3, :32] = torch.arange(32) / 4
    expert[4] = 0
    return {"matrix": matrix.bfloat16(), "expert": expert.bfloat16()}


def quantised(python: str, script: str, folder: Path) -> dict[str, Tensor]:
    save_file(weights(), folder / "in.safetensors")
    done = subprocess.run(
        [python, "-c", script, str(folder / "in.safetensors"), str(folder / "out.safetensors")],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "out.safetensors")


def assert_same_fp8(found: dict[str, Tensor], name: str) -> None:
    matrix = weights()["matrix"]
    ours = Fp8Matrix(
        "x", tuple(matrix.shape), (), "codes", "scales", torch.float32, (128, 128), name == "ue8m0"
    )
    codes, scales = ours._encode_rows(matrix.float())
    assert torch.equal(scales, found[f"{name}.scales"])
    differ = codes.view(torch.uint8) != found[f"{name}.codes"].view(torch.uint8)
    assert int(differ.sum()) == 0


@pytest.mark.timeout(900)
def test_sglangs(tmp_path: Path) -> None:
    found = quantised(PYTHON, SGLANG_QUANTISERS, tmp_path)
    assert_same_fp8(found, "ue8m0")
    expert = weights()["expert"]
    ours = MxExperts("x", (1, 320, 40), (), "blocks", "scales").encode(expert.t()[None])
    assert torch.equal(ours["scales"][0], found["mx.scales"])
    codes = unpacked(ours["blocks"][0].flatten(1))
    theirs = unpacked(found["mx.codes"])
    zero = expert == 0
    assert torch.equal(codes[~zero], theirs[~zero])
    assert set(codes[zero].tolist()) == {0} and set(theirs[zero].tolist()) == {8}  # 0 and -0


def unpacked(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path(VLLM_PYTHON).exists(), reason="no vLLM: make vllm-env")
def test_vllms(tmp_path: Path) -> None:
    found = quantised(VLLM_PYTHON, VLLM_QUANTISERS, tmp_path)
    assert_same_fp8(found, "ue8m0")
    assert_same_fp8(found, "float")
