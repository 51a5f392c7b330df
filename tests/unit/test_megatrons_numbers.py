"""Megatron's silent faults: the page's tests exist, in both languages, and what is not reachable or
refused is that."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.make_tiny_model import make_tiny_model
from tests.unit.command_lines import complete, problems_of
from tests.unit.test_fault_table import names_in

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"`((?:\w+/)+test_\w+\.py): ([\w ]+)`")
# of megatron-core: what the reports are about, and no run executes
AT_FAULT = (
    "vocab_parallel_cross_entropy",
    "fused_vocab_parallel_cross_entropy",
    "compute_language_model_loss",
    "process_mtp_loss",
    "CrossAttention",
    "LLaVAModel",
    "FullyShardedDataParallel",
)
REFUSED = (
    "--label-smoothing 0.1",
    "--use-megatron-fsdp",
    "--ckpt-format fsdp_dtensor",
    "--moe-shared-expert-overlap",
    "--generalized-tensor-parallel-size 2",
)


def rows(language: str) -> list[list[str]]:
    page = (ROOT / "docs" / language / "megatron_faults.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines[2:] if "`" in line]


def proofs(row: list[str]) -> list[tuple[str, str]]:
    return [(file, name) for file, names in CELL.findall(row[-1]) for name in names.split()]


def test_the_tests_of_every_row_exist() -> None:
    for row in rows("en"):
        assert proofs(row) or "search" in row[-2], row
        for file, name in proofs(row):
            assert name in names_in(file), (file, name)


def test_both_languages_have_the_same_rows() -> None:
    def links(language: str) -> list[tuple[list[str], list[tuple[str, str]]]]:
        return [(re.findall(r"\]\((http[^)\s]+)\)", row[0]), proofs(row)) for row in rows(language)]

    assert links("en") == links("zh")


def test_no_code_at_fault_is_used() -> None:
    """Nothing that a run executes has the name of a function or class at fault. What the last stage
    returns are hidden states: `PolicyModel` has no loss."""
    for path in [*ROOT.glob("slime_like/**/*.py"), *ROOT.glob("megatron_patches/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
            assert name not in AT_FAULT, f"{path}: {name}"


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_lead_there_are_refused(flag: str, tmp_path: Path) -> None:
    (found,) = problems_of(complete(tmp_path, *flag.split()), 1)
    assert found.flag == flag.split()[0]


def test_losses_are_never_divided_by_megatrons_tokens(tmp_path: Path) -> None:
    """slime's flag of that name chooses a reduction of our own."""
    from arguments.parse import parse_args

    for words in ((), ("--calculate-per-token-loss",)):
        config = parse_args(complete(tmp_path, *words), 1)
        assert config.megatron.transformer.calculate_per_token_loss is False


def test_experts_cut_otherwise_without_expert_parallelism_are_refused(tmp_path: Path) -> None:
    make_tiny_model("Qwen3MoeForCausalLM", tmp_path / "experts")
    words = complete(
        tmp_path,
        "--hf-checkpoint", str(tmp_path / "experts"), "--tensor-model-parallel-size", "2",
        "--sequence-parallel", "--expert-tensor-parallel-size", "1", without=("--hf-checkpoint",),
    )  # fmt: skip
    (found,) = problems_of(words, 2)
    assert found.flag == "--expert-tensor-parallel-size"
    assert "requires --expert-model-parallel-size above 1" in str(found)
