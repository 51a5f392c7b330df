"""Lines of JSON end with a newline, and with nothing else that `str.splitlines` splits at: a string
in JSON may have U+2028, U+0085 or a form feed as it is."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("arguments", "benchmarks", "examples", "megatron_patches", "scripts", "slime_like")
LINES = [{"a": "x\u2028y\x85z"}, {"a": "second"}]


def is_call_of(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    )


def splits_a_file(node: ast.AST) -> bool:
    """``path.read_text(...).splitlines(...)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr == "splitlines" and is_call_of(node.func.value, "read_text")


def test_no_program_splits_json_by_str_splitlines() -> None:
    found = []
    for folder in FOLDERS:
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.py.txt")]:
            text = path.read_text(encoding="utf-8")
            if "json.loads" in text and "splitlines" in text:
                splits = filter(splits_a_file, ast.walk(ast.parse(text)))
                found += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in splits]  # type: ignore[attr-defined]
    assert not found, "read JSON by the lines of the open file"


def test_the_reader_of_the_tinker_examples(tmp_path: Path) -> None:
    names: dict[str, Any] = runpy.run_path(str(ROOT / "examples/tinker/common.py"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in LINES), "utf-8")
    assert names["json_lines"](path) == LINES


def test_the_test_of_a_starter(tmp_path: Path) -> None:
    source = ROOT / "slime_like/cli/starters/shared/test_reward.py.txt"
    shutil.copy(source, tmp_path / "test_reward.py")
    (tmp_path / "reward.py").write_text("score = None\n")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in LINES)
    (tmp_path / "heldout.jsonl").write_text(text, "utf-8")
    sys.path.insert(0, str(tmp_path))
    try:
        assert runpy.run_path(str(tmp_path / "test_reward.py"))["ROWS"] == LINES
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("reward", None)
