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
from tests.pretend_gpu.test_settings import LIMITS, Numbers, Setting

ENGINE = Path(os.environ.get(FOLDER, ROOT / ".te-python"))
pytestmark = pytest.mark.skipif(
    not (ENGINE / "transformer_engine").is_dir(), reason="needs make te-python"
)


def run(name: str, folder: Path, environment: dict[str, str], ranks: int = 1, **more: Any) -> Any:
    """What the first rank returned."""
    target = f"tests.pretend_gpu.engine_worker:{name}"
    arguments = {"folder": str(folder), **more}
    variables = {**environment, FOLDER: str(ENGINE)}
    return run_ranks(target, ranks, folder, arguments, 800, preloaded=False, environment=variables)[
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


def test_what_counts_as_tensor_parallel_is_what_is_sharded(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The gradient norm takes other parameters from the first tensor-parallel rank alone; of both
    kinds of layers and every family."""
    models = {}
    for name in model_families.names():
        make_tiny_model(name, tmp_path / name)
        experts = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
        models[name] = (str(tmp_path / name), f"{SP} {experts if name == GPT_OSS else ''}")
    found = run("marks", tmp_path / "run", environment, ranks=2, models=models)
    assert len(found) == 2 * len(models)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


D, SP = "--use-distributed-optimizer", "--tensor-model-parallel-size 2 --sequence-parallel"
TP2 = "--tensor-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EVERYWHERE = (
    "--lora-rank 4 --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
)
LATENT = "--lora-rank 4 --lora-target-modules q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
DEEPSEEK, NEXT, GPT_OSS = (f"{name}ForCausalLM" for name in ("DeepseekV3", "Qwen3Next", "GptOss"))
DEEPSEEK_V4, STEP = "DeepseekV4ForCausalLM", "Step3p7ForConditionalGeneration"
SP_EP2 = f"{SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
SETTINGS = {
    1: {
        **{f"{name} one by one": Setting(name, D) for name in model_families.names()},
        "bf16": Setting("dense", f"--bf16 {D}"),
        "recomputed": Setting("dense", D, FULL),
        "stacked experts": Setting("experts", D, "--moe-grouped-gemm"),
        "adapters": Setting("dense", EVERYWHERE),
        "adapters in bf16": Setting("dense", f"--bf16 {EVERYWHERE}"),
        "adapters recomputed": Setting("dense", EVERYWHERE, FULL),
        "adapters of latent attention": Setting(DEEPSEEK, LATENT),
        "adapters of stacked experts": Setting("experts", EVERYWHERE, "--moe-grouped-gemm"),
        "adapters of Gemma": Setting("Gemma3ForCausalLM", EVERYWHERE),
        "stacked gpt-oss": Setting(GPT_OSS, D, "--moe-grouped-gemm"),
        **{
            f"stacked experts of {name}": Setting(name, D, "--moe-grouped-gemm")
            for name in (DEEPSEEK_V4, "Gemma 4 with experts", STEP)
        },
        "Gemma 4 with experts, one by one": Setting("Gemma 4 with experts", D),
        "Gemma 4 E2B": Setting("Gemma 4 E2B", D),
    },
    2: {
        "TP2": Setting("dense", D, SP),
        "TP2 without SP": Setting("dense", D, TP2),
        "PP2": Setting("dense", f"--bf16 {D}", "--pipeline-model-parallel-size 2"),
        "EP2": Setting("experts", D, "--expert-model-parallel-size 2"),
        "stacked experts EP2": Setting(
            "experts", D, "--expert-model-parallel-size 2 --moe-grouped-gemm"
        ),
        "latent attention TP2": Setting(DEEPSEEK, D, SP),
        "CP2": Setting("dense", D, "--context-parallel-size 2"),
        "CP2 adapters": Setting("dense", EVERYWHERE, "--context-parallel-size 2"),
        "delta nets TP2": Setting(NEXT, D, SP),
        "gpt-oss TP2 EP2": Setting(GPT_OSS, D, SP_EP2),
        **{
            f"{name} TP2 EP2": Setting(name, D, SP_EP2)
            for name in (DEEPSEEK_V4, "Gemma 4 with experts", STEP)
        },
        "adapters TP2": Setting("dense", EVERYWHERE, SP),
        "adapters TP2 without SP": Setting("dense", EVERYWHERE, TP2),
        "adapters of latent attention TP2": Setting(DEEPSEEK, LATENT, SP),
        "adapters of stacked experts EP2": Setting(
            "experts", EVERYWHERE, "--expert-model-parallel-size 2 --moe-grouped-gemm"
        ),
        "sparse TP2": Setting("GlmMoeDsaForCausalLM", D, SP),
    },
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_layers_give_the_numbers_of_local_layers(
    ranks: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Training with them, against one CPU process with the local layers."""
    numbers = Numbers(tmp_path)
    chosen = SETTINGS[ranks]
    base = {"base": str(tmp_path), "cells": numbers.cells(chosen, layout=False)}
    run_ranks("tests.pretend_gpu.worker:base_runs", 1, tmp_path / "base", base, 800)
    cells = numbers.cells(chosen, layout=True)
    found = run("run_cells", tmp_path, environment, ranks, base=str(tmp_path), cells=cells)
    assert found.keys() == chosen.keys()
    for name, apart in found.items():
        print(name, apart)
        limit = LIMITS[chosen[name].precision]
        assert all(v if isinstance(v, bool) else v < limit for v in apart.values()), (name, apart)


def test_norms_of_local_layers_under_sequence_parallelism(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    assert run("norms", tmp_path, environment) == [True]
