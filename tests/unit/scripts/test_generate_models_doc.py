"""The table of families in the pages is that of docs/models.yaml, and has every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_common import write_json
from scripts import generate_models_doc as program
from slime_like.weights.families import model_families


def test_the_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["generate_models_doc.py", "--check"])
    assert program.main() == 0


def test_every_row_is_a_family_or_a_case() -> None:
    from tests.dist.test_families import CASES

    rows = program.load()
    assert set(model_families.names()) <= rows.keys() <= CASES.keys()
    for row in rows.values():
        assert set(row.get("peers", {}).values()) <= {"y", "b", "-"}


def test_a_family_without_a_row_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = program.load()
    del rows["LlamaForCausalLM"]
    monkeypatch.setattr(program, "DATA", tmp_path / "models.yaml")
    program.write(rows)
    with pytest.raises(SystemExit, match="no rows of LlamaForCausalLM"):
        program.load()


def test_measured_figures_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = [3e-7, 1.26e-6, 5e-16, 2e-15, 0.0, 4, 6e-15]
    write_json(tmp_path / "out.json", {"rows": [["LlamaForCausalLM", *measured]]})
    rows = program.load()
    monkeypatch.setattr(program, "DATA", tmp_path / "models.yaml")
    program.write(rows)
    program.take_figures(tmp_path / "out.json")
    line = next(x for x in program.table(program.load(), "en").splitlines() if "`LlamaFor" in x)
    assert line.startswith("| `LlamaForCausalLM` | 3e-7 | 1e-6 | 5e-16 | 2e-15 | 0 | 6e-15 |")


def test_the_text_follows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest figures are those of the table, and the support pages count the architectures;
    an architecture without figures says so, and a case without any has no row."""
    rows = program.load()
    rows["LlamaForCausalLM"]["figures"]["gradients fp32"] = 0.5
    assert "measured: at most 2e-6 and 5e-1, " in program.models_page(rows, "en")[1]
    assert "与 5e-1、" in program.models_page(rows, "zh")[1]
    del rows["LlamaForCausalLM"]["figures"], rows["YaRN"]["figures"]
    table = program.table(rows, "en")
    assert "| `LlamaForCausalLM` | not measured | not measured |" in table
    assert "| YaRN |" not in table
    count = len(model_families.names())
    monkeypatch.setattr(program.model_families, "names", lambda: ["one"] * (count + 1))
    assert f"[{count + 1} architectures](models.md)" in program.support_page("en")[1]
    assert f"[{count + 1} 种架构](models.md)" in program.support_page("zh")[1]
