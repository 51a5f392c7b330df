"""Docstrings document the arguments that a function has, and each field is documented at itself."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from slime_like.advantages import advantage_estimators
from slime_like.losses import policy_losses
from tests.paths import ROOT

FOLDERS = (
    "slime_like",
    "arguments",
    "megatron_patches",
    "scripts",
    "benchmarks",
    "examples",
    "tests",
)
_ARGS = re.compile(r"^Args:\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    ((?:\*{0,2}\w+, )*\*{0,2}\w+): ", re.MULTILINE)
_DESCRIBED = re.compile(r"(?:^|(?<=[.;]\s))((?:\w+, )*\w+):\s")


def fields_of(node: ast.ClassDef) -> set[str]:
    return {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Names of a function's parameters; of a class, those of its constructor and its fields."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return fields_of(node).union(*map(parameters_of, inits))
    a = node.args
    return {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p}


def misplaced_or_missing(source: str) -> Iterator[str]:
    """What docstrings describe and that is not there, or is described elsewhere."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        if section := _ARGS.search(text):
            names = {
                n for m in _ARGUMENT.findall(section[1]) for n in m.replace("*", "").split(", ")
            }
            yield from (
                f"{node.name} has no {name}" for name in sorted(names - parameters_of(node))
            )
        if isinstance(node, ast.ClassDef):
            flat = " ".join(text.split("\nArgs:")[0].split())
            described = {n for m in _DESCRIBED.findall(flat) for n in m.split(", ")}
            here = sorted(described & fields_of(node))
            yield from (f"{node.name}: describe {name} in a comment at the field" for name in here)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_describe_what_is_there(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (problems := list(misplaced_or_missing(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_what_is_wrong_is_found() -> None:
    source = '''
class Row:
    """One row. length: of it. Note: no field.

    Args:
        a, b: Two.
        *rest: Others.
    """

    length: int

    def __init__(self, a: int, *rest: int) -> None: ...
'''
    assert list(misplaced_or_missing(source)) == [
        "Row has no b",
        "Row: describe length in a comment at the field",
    ]


def test_losses_and_estimators_have_their_equations() -> None:
    """In the head of the file or at the function, as `l = ...` and `A_t = ...`."""
    functions = {
        **{f"loss {name}": entry.fn for name, entry in policy_losses.items()},
        **{f"estimator {name}": entry.fn for name, entry in advantage_estimators.items()},
    }
    equation = re.compile(r"\bl\s+= |\bA_\w+\s+= ")
    without = []
    for name, function in functions.items():
        text = f"{inspect.getmodule(function).__doc__}{function.__doc__}"
        if not equation.search(text) or not function.__doc__:
            without.append(name)
    assert without == []
