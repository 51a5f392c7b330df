"""--allow-untested passes settings of megatron-core on that are rejected otherwise, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        ("fp16:true", "must be NAME:VALUE with a NAME of"),
        ("tp_comm_overlap:yes", "must be true or false"),
        ("fp8_margin:x", "invalid literal for int()"),
        ("fp8:e9", "must be one of e4m3, hybrid"),
    ],
)
def test_wrong_words(tmp_path: Path, word: str, reported: str) -> None:
    (problem,) = problems_of(complete(tmp_path, FLAG, word))
    assert problem.flag == FLAG and reported in problem.message


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
