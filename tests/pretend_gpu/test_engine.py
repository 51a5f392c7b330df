"""Where Transformer Engine is installed: its real Python, over a stand-in for its kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.models import make_model
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.families import model_families
from tests.pretend_gpu.build import ROOT
from tests.pretend_gpu.engine import FOLDER

ENGINE = Path(os.environ.get(FOLDER, ROOT / ".te-python"))
pytestmark = pytest.mark.skipif(
    not (ENGINE / "transformer_engine").is_dir(), reason="needs make te-python"
)


def run(name: str, folder: Path, environment: dict[str, str], ranks: int = 1, **more: Any) -> Any:
    """What the first rank returned."""
    target = f"tests.pretend_gpu.engine_worker:{name}"
    arguments = {"folder": str(folder), **more}
    variables = {**environment, FOLDER: str(ENGINE)}
    return run_ranks(target, ranks, folder, arguments, 300, preloaded=False, environment=variables)[
        0
    ]


def test_its_adam_does_what_torchs_does(tmp_path: Path, environment: dict[str, str]) -> None:
    """It has no state before its first step, and counts its steps by parameter group: a checkpoint
    and a model that takes over another's place have both."""
    make_model(tmp_path / "model", seed=3)
    precise = "--use-distributed-optimizer --use-precision-aware-optimizer"
    flags = ("--use-distributed-optimizer", "--lora-rank 4", "", precise)
    found = run("adam", tmp_path, environment, model=str(tmp_path / "model"), flags=flags)
    for case, seen in found.items():
        assert seen.pop("module") == "transformer_engine.pytorch.optimizers.fused_adam"
        assert len(seen) == 6 and all(seen.values()), (case, seen)


def test_layers_of_every_family_load_and_export_the_same_bits(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """megatron-core builds them from Transformer Engine's classes, which fuse norms into the linear
    layers behind them, and stack experts with --moe-grouped-gemm."""
    models = {}
    for name in model_families.names():
        make_tiny_model(name, tmp_path / name)
        models[name] = (str(tmp_path / name), "")
    for name in ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"):
        models[f"{name}, stacked"] = (str(tmp_path / name), "--moe-grouped-gemm")
    found = run("layers", tmp_path / "run", environment, models=models)
    assert found.keys() == models.keys()
    for name, seen in found.items():
        assert seen["impl"] == "transformer_engine" and seen["of Transformer Engine"], name
        assert seen["changed"] == [] and seen["exported"] > 10, (name, seen)


def test_norms_of_local_layers_under_sequence_parallelism(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    assert run("norms", tmp_path, environment) == [True]
