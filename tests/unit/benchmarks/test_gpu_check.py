"""`make gpu-check` without a GPU: goals, rows of checks that fail or do not end, the command lines
of its models, and (extended) every check at tiny sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from benchmarks.gpu_check import run as gpu_check
from benchmarks.gpu_check.run import CHECKS, Check, Goal, main, run_apart
from benchmarks.gpu_check.training import MODELS, RECOMPUTE

FACTS = CHECKS[0]


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("x", most=1.3), 0.0, True),
        (Goal("x", most=1.3), 1.4, False),
        (Goal("x", least=0.45), 0.46, True),
        (Goal("x", least=0.45), 0.44, False),
        (Goal("x", most=1.3), float("nan"), False),
        (Goal("x"), True, True),
        (Goal("x"), False, False),
        (Goal("x", most=1.0), None, False),
        (Goal("y", most=1.0), 0.5, False),
    ],
)
def test_goals(goal: Goal, value: Any, met: bool) -> None:
    assert goal.met({"x": value}) is met


def test_a_check_that_raises_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Check("broken", "machine:nothing", "what is not there")
    monkeypatch.setattr(gpu_check, "CHECKS", (broken, FACTS))
    assert main(["--rehearse", "--output-dir", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["status"] for row in found["checks"]] == ["FAILED", "rehearsed"]
    page = (tmp_path / "gpu_check.md").read_text()
    assert "has no attribute 'nothing'" in page and page in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    assert main(["--output-dir", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert [row["name"] for row in rows] == [check.name for check in CHECKS]
    assert {row["status"] for row in rows} == {"not run: no GPU"}


def test_a_check_is_a_process_with_a_limit() -> None:
    row = run_apart(FACTS, rehearse=True, left_s=300)
    assert (row.status, row.figures["device"]) == ("rehearsed", "cpu"), row.error
    late = run_apart(dataclasses.replace(FACTS, limit_s=0.1), rehearse=True, left_s=300)
    assert late.status == "FAILED" and late.error.endswith("not done after 0.1 s")
    assert run_apart(FACTS, rehearse=True, left_s=1).status == "not run: no time left"


def test_the_models_are_qwens(tmp_path: Path) -> None:
    """Their command lines are taken, and describe Qwen3-0.6B and Qwen3-1.7B."""
    flags = (
        f"--debug-train-only --load-debug-rollout-data {tmp_path}/{{rollout_id}} --num-rollout 1 "
        "--lr 1e-4 --bf16 "
        f"--rollout-batch-size 4 --n-samples-per-prompt 8 {RECOMPUTE}"
    )
    for model, hidden, inner in (("0.6B", 1024, 3072), ("1.7B", 2048, 6144)):
        config = parse_args(f"{MODELS[model]} {flags}".split(), 1)
        transformer = config.megatron.transformer
        assert (transformer.num_layers, transformer.hidden_size, transformer.ffn_hidden_size) == (
            28,
            hidden,
            inner,
        )
        assert (transformer.num_attention_heads, transformer.num_query_groups) == (16, 8)
        assert (
            transformer.kv_channels == 128
            and transformer.qk_layernorm
            and transformer.gated_linear_unit
        )
        assert not transformer.add_bias_linear and not transformer.add_qkv_bias
        assert (config.gpt.vocab_size, config.gpt.rotary_base) == (151936, 1000000)
        assert not config.gpt.untie_embeddings_and_output_weights


@pytest.mark.extended
def test_rehearsal(tmp_path: Path) -> None:
    assert main(["--rehearse", "--without", "demo", "--output-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert {row["name"] for row in rows if row["status"] != "rehearsed"} == {"snapshot"}
    figures = {row["name"]: row["figures"] for row in rows}
    assert figures["train_fp32"]["loss_change"] < 0 and figures["train_bf16"]["loss_change"] < 0
    assert figures["offload"]["same_bits"] and figures["handoff"]["right"]
    assert figures["head"]["time_ratio"] > 0 and figures["mfu_1.7b_8k"]["tokens_per_s"] > 0


@pytest.mark.slow
def test_rehearsal_of_the_demo(tmp_path: Path) -> None:
    assert main(["--rehearse", "--only", "demo", "--output-dir", str(tmp_path)]) == 0
