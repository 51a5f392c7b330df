"""--allow-untested passes settings of megatron-core on that are rejected otherwise, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arguments.function_args import function_args
from arguments.megatron_configs import Machine
from arguments.megatron_fields import FIELDS
from arguments.parse import parse_args
from arguments.untested import read_untested, untested_fields
from tests.unit.command_lines import complete, problems_of

FLAG = "--allow-untested"


def test_they_reach_megatron_core_and_are_reported_once(tmp_path: Path) -> None:
    words = (
        "cuda_graph_warmup_steps:5", "fp8_margin:1", "tp-comm-overlap-ag:false", "fp8_recipe:tensorwise",
        "cpu_offloading_double_buffering:true",
    )  # fmt: skip
    config = parse_args(complete(tmp_path, FLAG, *words), 1)
    transformer = config.megatron.transformer
    assert transformer.cuda_graph_warmup_steps == 5 and transformer.fp8_margin == 1
    assert transformer.tp_comm_overlap_ag is False and transformer.fp8_recipe == "tensorwise"
    assert transformer.cpu_offloading_double_buffering is True
    (reported,) = [warning for warning in config.warnings if FLAG in warning]
    assert "no test covers cuda_graph_warmup_steps:5, fp8_margin:1, " in reported
    assert not any(FLAG in warning for warning in parse_args(complete(tmp_path), 1).warnings)


def test_without_the_flag_they_are_rejected(tmp_path: Path) -> None:
    (problem,) = problems_of(complete(tmp_path, "--fp8-margin", "1"))
    assert "fp8 and fp4 training" in problem.message


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("fp8", "must be NAME:VALUE with a NAME of activation_func_fp8_input_store, "),
        ("hidden_size:3", "--hidden-size is tested: give it as a flag of its own"),
        ("tp_comm_overlap:yes", "must be true or false"),
        ("fp8_margin:x", "invalid literal for int()"),
        ("fp8:e9", "must be one of e4m3, hybrid"),
    ],
)
def test_wrong_words(tmp_path: Path, word: str, reported: str) -> None:
    (problem,) = problems_of(complete(tmp_path, FLAG, word))
    assert problem.flag == FLAG and reported in problem.message


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("--bf16 --allow-untested fp16:true", "conflicts with --bf16"),
        ("--allow-untested initial_loss_scale:64", "requires fp16:true"),
        ("--allow-untested fp16:true loss_scale:0", "must be above 0"),
        ("--allow-untested fp16:true hysteresis:-1", "must be above 0"),
        ("--allow-untested fp16:true min_loss_scale:1e9", "must not be above initial_loss_scale"),
    ],
)
def test_wrong_loss_scales(tmp_path: Path, words: str, reported: str) -> None:
    (problem,) = problems_of(complete(tmp_path, *words.split()))
    assert problem.flag == FLAG and reported in problem.message


def test_fp16_reaches_every_config(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, FLAG, "fp16:true", "loss_scale_window:9"), 1)
    megatron = config.megatron
    assert megatron.transformer.fp16 and megatron.optimizer.fp16 and not megatron.transformer.bf16
    assert megatron.transformer.params_dtype == megatron.optimizer.params_dtype == torch.float16
    assert megatron.ddp.grad_reduce_in_fp32 and megatron.optimizer.loss_scale_window == 9
    assert megatron.optimizer.initial_loss_scale == 2**16
    assert function_args(config).fp16 is True


def test_a_second_value_is_refused() -> None:
    _, (problem,) = read_untested(["fp8_margin:1", "fp8-margin:2"])
    assert "gives fp8_margin a second value" in problem.message


def test_nothing_tested_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = untested_fields().keys()
    assert not names & FIELDS and len(names) > 30
    assert {"fp8", "cuda_graph_impl", "cpu_offloading", "tp_comm_overlap"} <= names


def test_what_megatron_core_rejects_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(True, False, False))
    (problem,) = problems_of(complete(tmp_path, FLAG, "overlap_moe_expert_parallel_comm:true"))
    assert "rejected by megatron-core" in problem.message
