"""run.json: which code a run was of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slime_like.trainer import run_record


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "slime_like/__init__.py"
    code.parent.mkdir()
    code.touch()
    monkeypatch.setattr(run_record.slime_like, "__file__", str(code))
    assert run_record.commit() is None, "no clone"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert run_record.commit() == head
    code.write_text("changed = True\n")
    assert run_record.commit() == f"{head}-dirty"
    assert run_record.environment()["commit"] == f"{head}-dirty"
