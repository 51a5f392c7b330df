"""--optimizer muon on the command line, whether or not its package is installed."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from arguments.rules import muon
from arguments.run_config import RunConfig
from slime_like.config import ConfigError
from slime_like.megatron.muon import has_muon
from tests.unit.command_lines import complete

MUON = "--optimizer muon"


def installed(
    monkeypatch: pytest.MonkeyPatch, version: str | None, megatron: str, triton: bool = True
) -> None:
    """As if this version of the package, or none, were next to this megatron-core."""
    find_spec, version_of = importlib.util.find_spec, metadata.version
    there = {"emerging_optimizers": version is not None, "triton": triton}

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        if name not in there:
            return find_spec(name, package)
        return ModuleSpec(name, None) if there[name] else None

    def version_here(name: str) -> str:
        return str(version) if name == "emerging_optimizers" else version_of(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(metadata, "version", version_here)
    numbers = tuple(int(part) for part in megatron.split(".")[:2])
    monkeypatch.setattr(muon, "release", lambda: numbers)
    monkeypatch.setattr(muon, "megatron_version", lambda: megatron)


def parse(folder: Path, flags: str, world_size: int = 1) -> RunConfig:
    return parse_args(complete(folder, *flags.split()), world_size)


@pytest.mark.parametrize(
    ("version", "megatron", "triton", "message"),
    [
        (None, "0.16.1", True,
         ("0.1 for megatron-core 0.16.1), which is not installed", "pip install triton",
          "@v0.1.0")),
        ("0.3.0", "0.16.1", True, ("0.3.0 is installed", "@v0.1.0")),
        ("0.1.0", "0.16.1", False, ("and triton, which is not installed", "pip install triton")),
        (None, "0.19.2", True,
         ("0.2 or later for megatron-core 0.19.2), which is not",
          "pip install emerging-optimizers")),
        ("0.1.0", "0.19.2", True, ("0.1.0 is installed", "pip install emerging-optimizers")),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_how_to_get_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    megatron: str,
    triton: bool,
    message: tuple[str, ...],
) -> None:
    installed(monkeypatch, version, megatron, triton)
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, MUON)
    (problem,) = caught.value.problems
    assert problem.flag == "--optimizer" and problem.value == "muon"
    words = str(problem)
    assert all(part in words for part in ("emerging_optimizers", "or use adam", *message)), words


WRONG = [
    ("", "--use-distributed-optimizer", "--use-distributed-optimizer",
     "remove it"),
    ("", "--lora-rank 4", "--lora-rank", "use adam"),
    ("", "--no-decoupled-weight-decay", "--no-decoupled-weight-decay",
     "has no effect with --optimizer muon"),
    ("", "--muon-momentum 1", "--muon-momentum", "0 <= x < 1"),
    ("", "--muon-extra-scale-factor 0", "--muon-extra-scale-factor", "> 0"),
    ("check_muon_iterations", "--muon-num-ns-steps 4", "--muon-num-ns-steps", "multiple of 5"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "flags", "flag", "message"), WRONG)
def test_wrong_combinations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, flags: str, flag: str, message: str
) -> None:
    installed(monkeypatch, "0.1.0", "0.16.1")
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, f"{MUON} {flags}")
    assert [p for p in caught.value.problems if p.flag == flag and message in str(p)], caught.value


def test_any_number_of_steps_since_the_package_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "0.3.0", "0.19.2")
    optimizer = parse(tmp_path, f"{MUON} --muon-num-ns-steps 4").megatron.optimizer
    assert optimizer.optimizer == "muon" and optimizer.muon_num_ns_steps == 4
    with pytest.raises(ConfigError, match="must be >= 1"):
        parse(tmp_path, f"{MUON} --muon-num-ns-steps 0")


@pytest.mark.parametrize(("megatron", "refused"), [("0.17.1", True), ("0.18.2", False)])
def test_gated_attention_is_split_since_megatron_core_counts_the_gate(
    monkeypatch: pytest.MonkeyPatch, megatron: str, refused: bool
) -> None:
    installed(monkeypatch, "0.3.0", megatron)
    core: dict[str, Any] = {"optimizer": "muon", "attention_output_gate": True}
    found = muon.check_muon_split_qkv(SimpleNamespace(core=core))  # type: ignore[arg-type]
    assert [p.flag for p in found] == ["--muon-split-qkv"] * refused
    core["muon_split_qkv"] = False
    assert not muon.check_muon_split_qkv(SimpleNamespace(core=core))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["window_groups", "value_channels"])
def test_heads_that_differ_by_layer_are_not_split(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    installed(monkeypatch, "0.3.0", "0.19.2")
    core: dict[str, Any] = {"optimizer": "muon", field: 2}
    (found,) = muon.check_muon_split_qkv(SimpleNamespace(core=core))  # type: ignore[arg-type]
    assert "differ by layer; add --muon-no-split-qkv" in found.message
    core["muon_split_qkv"] = False
    assert not muon.check_muon_split_qkv(SimpleNamespace(core=core))  # type: ignore[arg-type]


def test_flags_reach_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.1.0", "0.16.1")
    flags = (
        "--muon-momentum 0.9 --muon-no-split-qkv --muon-use-nesterov --muon-num-ns-steps 10 "
        "--muon-scale-mode unit_rms_norm --muon-fp32-matmul-prec highest --muon-extra-scale-factor "
        "0.2"
    )
    optimizer = parse(tmp_path, f"{MUON} {flags}").megatron.optimizer
    nesterov = getattr(optimizer, "muon_use_nesterov", getattr(optimizer, "muon_nesterov", None))
    assert (optimizer.muon_momentum, optimizer.muon_split_qkv, nesterov) == (0.9, False, True)
    assert (optimizer.muon_num_ns_steps, optimizer.muon_scale_mode) == (10, "unit_rms_norm")
    assert (optimizer.muon_fp32_matmul_prec, optimizer.muon_extra_scale_factor) == ("highest", 0.2)
    assert optimizer.muon_tp_mode == "duplicated", "the numbers of one process in every layout"


def test_a_setting_of_muon_without_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no effect without --optimizer muon"):
        parse(tmp_path, "--muon-momentum 0.9")


def test_blocks_of_the_layout_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.1.0", "0.16.1")
    blocks, size = "--muon-tp-mode blockwise", "--tensor-model-parallel-size 2"
    for flags, ranks, reported in (
        (f"{blocks} {size}", 2, True),
        (blocks, 1, False),
        (size, 2, False),
    ):
        config = parse(tmp_path, f"{MUON} {flags}", ranks)
        assert any("--muon-tp-mode blockwise" in words for words in config.warnings) is reported


def test_the_head_of_a_critic_is_no_matrix_for_muon() -> None:
    """One row, orthogonalised, would move by the whole learning rate in every step."""
    from slime_like.megatron.model.value import ValueHead

    config = SimpleNamespace(sequence_parallel=False, hidden_size=4, params_dtype=torch.float32)
    head = ValueHead(config)  # type: ignore[arg-type]
    assert [has_muon(p) for p in head.parameters()] == [False, False]
    assert has_muon(torch.nn.Linear(2, 3).weight)
