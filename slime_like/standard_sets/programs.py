"""Programs: HumanEval (Chen et al. 2021, arXiv 2107.03374) and MBPP (Austin et al. 2021, arXiv
2108.07732), both also with the tests of EvalPlus (Liu et al. 2023, arXiv 2305.01210), and
LiveCodeBench (Jain et al. 2024, arXiv 2403.07974)."""

from __future__ import annotations

import json
import re
from typing import Any

from slime_like.rewards import packed_tests
from slime_like.standard_sets.base import (
    NotThisSet,
    Problem,
    Row,
    StandardSet,
    column,
    standard_sets,
    texts,
)

_FENCED = (
    "\n\nThink if you need to, and end with the whole program in one block that begins with "
    "```python."
)
_COMPLETE = (
    "Write this Python function, with all imports that it needs:\n\n"
    "```python\n{{ prompt }}\n```" + _FENCED
)
_TASK = (
    "{{ task }}\n\nThe program is in Python, and these tests must pass:\n\n"
    "```python\n{{ tests }}\n```" + _FENCED
)
_CONTEST = (
    """\
{{ question }}

{% if starter_code %}Write this in Python; the method gets the arguments and returns the answer:

```python
{{ starter_code }}
```{% else %}The Python program reads standard input and writes the answer to standard output.\
{% endif %}"""
    + _FENCED
)

# The tests of EvalPlus take these names of numpy, which no sandbox has; none of their values is an
# array.
_WITHOUT_NUMPY = """\
import sys, types
def _close(a, b, rtol=1e-05, atol=1e-08):
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_close(x, y, rtol, atol) for x, y in zip(a, b))
    return a == b or abs(a - b) <= atol + rtol * abs(b)
def _must_be_close(a, b, rtol=1e-07, atol=0):
    assert _close(a, b, rtol, atol)
numpy = types.ModuleType("numpy")
numpy.testing = types.ModuleType("numpy.testing")
numpy.testing.assert_allclose = _must_be_close
numpy.ndarray, numpy.float64, numpy.float32 = (type(name, (), {}) for name in ("a", "b", "c"))
numpy.allclose, numpy.inf, numpy.nan = _close, float("inf"), float("nan")
sys.modules["numpy"] = numpy
"""
_CONTEST_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, json
import math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import *
sys.setrecursionlimit(50000)
"""
_METHOD = re.compile(r"def\s+(\w+)\s*\(")


def human_eval(row: Row) -> Problem:
    """A row with the head of a function, and tests ``def check(candidate)``. Answers that only
    continue the head are programs too: the head goes before every answer."""
    head, name, test = (column(row, key) for key in ("prompt", "entry_point", "test"))
    if "def check(" not in test or f"def {name}" not in head:
        raise NotThisSet(f"'test' must define check, and 'prompt' {name}")
    head = head if head.endswith("\n") else head + "\n"
    numpy = _WITHOUT_NUMPY if "numpy" in test else ""
    tests = [{"code": f"{numpy}{test}\ncheck({name})\n"}]
    solution = row.get("canonical_solution")
    metadata = {"tests": tests, "prelude": head, "memory_mb": 1024, "timeout_s": 10.0}
    return Problem({"prompt": head.rstrip()}, metadata=metadata, solution=solution)


def mbpp(row: Row) -> Problem:
    """A row with a task and tests that are assertions; ``text`` in the full file, ``prompt`` in the
    sanitized one and in EvalPlus's, whose ``test`` are more tests."""
    asserts = texts(row, "test_list")
    imports = list(row.get("test_imports") or [])
    setup = row.get("test_setup_code") or ""
    more = row.get("test") or ""
    if not asserts:
        raise NotThisSet("'test_list' is empty")
    numpy = _WITHOUT_NUMPY if "numpy" in more else ""
    code = "\n".join([*imports, setup, *asserts, numpy + more])
    shown = {"task": column(row, "text", "prompt").strip(), "tests": "\n".join(asserts)}
    metadata = {"tests": [{"code": code}], "memory_mb": 1024, "timeout_s": 10.0}
    return Problem(shown, metadata=metadata, solution=row.get("code"))


def live_code_bench(row: Row) -> Problem:
    """A row with a question, public tests as JSON, and private ones as JSON or packed."""
    question = column(row, "question_content")
    starter = row.get("starter_code") or ""
    function = _function(row) if starter.strip() else None
    try:
        tests = packed_tests.tests_of(column(row, "public_test_cases"), function)
        private = column(row, "private_test_cases")
        if not tests + packed_tests.tests_of(private, function):
            raise NotThisSet("has no tests")
    except packed_tests.NoTests as error:
        raise NotThisSet(str(error)) from error
    metadata = {
        "tests": tests,
        "packed_tests": private,
        "function": function,
        "prelude": _CONTEST_IMPORTS,
        "compare": "numbers",
        "memory_mb": 2048,
        "timeout_s": 6.0,
    }
    return Problem({"question": question, "starter_code": starter}, metadata=metadata)


def _function(row: Row) -> str:
    """The method that the tests call."""
    try:
        named = json.loads(row.get("metadata") or "{}").get("func_name")
    except (AttributeError, TypeError, ValueError) as error:
        raise NotThisSet(f"'metadata' is no JSON object: {error}") from error
    found = [named] if named else _METHOD.findall(column(row, "starter_code"))
    if not found or not str(found[-1]).isidentifier():
        raise NotThisSet("'metadata' has no func_name, and 'starter_code' no method")
    return str(found[-1])


_HUMAN_EVAL = ("prompt", "entry_point", "test", "canonical_solution")
_MBPP = ("text", "prompt", "test_list", "test_setup_code", "test_imports", "test", "code")


def _add(name: str, about: str, **values: Any) -> None:
    standard_sets.add(name, StandardSet(about, reward="code", **values))


_add(
    "humaneval",
    "functions from their description; 164",
    read=human_eval,
    columns=_HUMAN_EVAL,
    names=("prompt",),
    template=_COMPLETE,
    files=("openai_humaneval/test-*.parquet", "HumanEval.jsonl", "HumanEval.jsonl.gz"),
    hub=("openai/openai_humaneval",),
    package=("human_eval", "data/HumanEval.jsonl.gz", "human-eval"),
)
_add(
    "humaneval-plus",
    "the same with 80 times as many tests",
    read=human_eval,
    columns=_HUMAN_EVAL,
    names=("prompt",),
    template=_COMPLETE,
    files=("data/test-*.parquet", "HumanEvalPlus*.jsonl", "HumanEvalPlus*.jsonl.gz"),
    hub=("evalplus/humanevalplus",),
    rm_timeout_s=30.0,
)
_add(
    "mbpp",
    "basic programs; 500, or 257 in the sanitized file",
    read=mbpp,
    columns=_MBPP,
    names=("task", "tests"),
    template=_TASK,
    files=("full/test-*.parquet", "sanitized/test-*.parquet", "sanitized-mbpp.json"),
    hub=("google-research-datasets/mbpp",),
)
_add(
    "mbpp-plus",
    "378 of them with 35 times as many tests",
    read=mbpp,
    columns=_MBPP,
    names=("task", "tests"),
    template=_TASK,
    files=("data/test-*.parquet",),
    hub=("evalplus/mbppplus",),
    rm_timeout_s=30.0,
)
_add(
    "livecodebench",
    "contest problems by date",
    read=live_code_bench,
    columns=(
        *("question_content", "starter_code", "metadata"),
        *("public_test_cases", "private_test_cases"),
    ),
    names=("question", "starter_code"),
    template=_CONTEST,
    files=("test*.jsonl", "data/test-*.parquet"),
    parts=True,
    hub=("livecodebench/code_generation_lite",),
    rm_timeout_s=300.0,
)
