"""fp16 with a loss scale: its unscaled gradients are float32's, and an overflow skips one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity.models import MODELS
from benchmarks.parity.ranks import run_ranks

D = "--use-distributed-optimizer"
AUX = "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.01 --moe-router-dtype fp32"
ONE = {
    "plain": ("dense", ""),
    "experts": ("experts", AUX),
    "adapters": ("dense", "--lora-rank 4"),
}
TWO = {
    "DP2": ("dense", D),
    "PP2": ("dense", f"{D} --pipeline-model-parallel-size 2"),
    "TP2": ("dense", "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2": ("experts", f"{D} {AUX} --expert-model-parallel-size 2"),
}
# fp16 has 11 bits of mantissa; of the whole gradient. bf16's is at 1e-2
GRADIENT = 3e-3
NORM = 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_unscaled_gradients_are_those_of_float32(ranks: int, tmp_path: Path) -> None:
    cells = _cells(tmp_path, ranks)
    for found in _run("compare_gradients", ranks, tmp_path, cells):
        for name, scales in found.items():
            for scale, (gradient, norm) in scales.items():
                assert gradient < GRADIENT and norm < NORM, f"{name}, {scale}: {gradient}, {norm}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_skips_one_step(ranks: int, tmp_path: Path) -> None:
    """And lowers the scale of all parts of the optimizer; moments stay, and checkpoints and models
    that take over a slot carry the scale."""
    for found in _run("overflow", ranks, tmp_path, _cells(tmp_path, ranks)):
        for name, seen in found.items():
            assert seen["skipped"] == [False, True, False], name
            assert seen["scales"] == [1024, 1024, 1024, 512, 512, 512], name
            assert seen["reset"] == 1024, name
            assert seen["kept"] and seen["resumed"], name
            assert abs(seen["norms"][0] - 1) < 1e-4, name
            assert seen["apart"] < 1e-5, name


def _cells(folder: Path, ranks: int) -> dict[str, tuple[str, str]]:
    cells = {}
    for name, (model, flags) in (ONE if ranks == 1 else TWO).items():
        if not (folder / model).exists():
            MODELS[model](folder / model)
        cells[name] = (str(folder / model), flags)
    return cells


def _run(function: str, ranks: int, folder: Path, cells: object) -> list[dict]:
    arguments = {"cells": cells, "out": str(folder / "out")}
    worker = f"tests.dist.fp16_worker:{function}"
    return run_ranks(worker, ranks, folder / "ranks", arguments, timeout_s=240)
