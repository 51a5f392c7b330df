"""Inspect an installation of SGLang without importing it, which takes seconds and may need a
GPU."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from functools import cache
from pathlib import Path

_FIND = """
import importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    print(spec.origin if spec and spec.origin else "-")
"""


@cache
def packages_of(python: str) -> tuple[Path | None, Path | None]:
    """Folders of sglang and sglang_router as found by the interpreter `python`. Raises OSError if
    it cannot be run."""
    sglang, router = _origins(python, "sglang", "sglang_router")
    return _folder(sglang), _folder(router)


@cache
def folder_of(python: str, package: str) -> Path | None:
    """The folder of a package as found by the interpreter `python`. Raises OSError if it cannot be
    run."""
    (origin,) = _origins(python, package)
    return _folder(origin)


def _origins(python: str, *packages: str) -> list[str]:
    done = subprocess.run(
        [python, "-c", _FIND, *packages], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise OSError(f"exit status {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout.split("\n")[: len(packages)]


def _folder(origin: str) -> Path | None:
    return None if origin == "-" else Path(origin).parent


def interpreter(sglang_python: str | None) -> str:
    return sglang_python or sys.executable


def fields_of(files: list[Path]) -> set[str]:
    """Annotated names in the classes of these files: the fields of dataclasses."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    names.add(item.target.id)
    return names


def server_fields(sglang: Path) -> set[str]:
    """Field names of ServerArgs, which newer versions split over several files."""
    further = sorted((sglang / "srt" / "arg_groups" / "fields").glob("*.py"))
    return fields_of([sglang / "srt" / "server_args.py", *further])


def deterministic_backends(sglang: Path) -> set[str]:
    """The attention backends that its --enable-deterministic-inference supports; empty if this
    version does not list them where we look."""
    name = "DETERMINISTIC_ATTENTION_BACKEND_CHOICES"
    for file in (sglang / "srt" / "arg_groups" / "choices.py", sglang / "srt" / "server_args.py"):
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
                continue
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                return {str(ast.literal_eval(item)) for item in node.value.elts}
    return set()


def router_fields(router: Path) -> set[str]:
    return fields_of([router / "router_args.py"])


def nearest(name: str, known: set[str]) -> str | None:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None
