"""Scorers that evaluate text: which code runs, and that an answer with any other scores like none."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from slime_like.rewards import evaluation, task, worker
from slime_like.rewards.evaluation import is_harmless, watched
from slime_like.rewards.registry import rewards

ARITHMETIC = (
    *("42", "-1.5e3", "[1, 2, 3]", "[[0, 1], [1, 0]]", "{1: (2, 3)}", "((1 + 2) * 3)", "1 < 2",
        "3 in [3]", "not 0"),
    *("['a', \"b_c\"]", "['-69', '-13']", "max(2, 3)", "{1, 2}", "round(2.5)", "float('nan') < 1",
        "'%s' % 2"),
)  # fmt: skip
OF_SYMPY = (
    *(
        "x + 3*y**2",
        "x*(x + 1)",
        "2*(sin (x) + cos(2*x))",
        "exp(-x)*(1 - x)",
        "sqrt(2) + pi",
        "theta/2",
        "5!",
    ),
    *(
        "f(42)",
        "f(x, y)",
        "Function('f')(2)",
        "S('1 + 1')",
        "Rational(1, 3)",
        "x(2)",
        "log(2*E)",
        "C + x**2/2",
    ),
)
# evaluated as Python they could change how later answers are scored, or reach what does
REFUSED = (
    *("'a'.upper()", "[1][0]", "(lambda: 1)()", "[x for x in [1]]", "(y := 1)", "[*[1], *'ab'][0]",
        "print()"),
    *("__import__('os')", "setattr(int, 'a', 1)", "eval('1')", "exec('a = 1')", "globals()",
        "vars(int)", "().__class__"),
    *("int('1', base=8)", "open('/etc/passwd')", "type('T', (int,), {})", "f'{1}'",
        "getattr(1, 'real')", "__builtins__"),
    *("next(iter([1]))", "iter", "str | help", "dict(a=1)", "max([1], key=print)", "int and print",
        "int if int else 2"),
)  # fmt: skip
REFUSED_BY_SYMPY = (
    *("__import__('os')", "S('__import__(\"os\")')", "sin('setattr(int, \"a\", 1)')",
        "x.subs(x, 1)", "var('q')"),
    *("Function('f', 1)", "Function('f', (Symbol,), {'__eq__': Max})(1)", "Function(Symbol('f'))",
        "Dummy()"),
    *("lambdify(x, x)", "Symbol('x', real=True)", "Function('f', real=True)(2)", "Lambda(x, x)"),
)  # fmt: skip


def by_python(text: str) -> Any:
    return eval(text)


def by_sympy(text: str) -> Any:
    return pytest.importorskip("sympy").parse_expr(text)


@pytest.mark.parametrize(
    ("evaluate", "text"),
    [(by_python, text) for text in ARITHMETIC] + [(by_sympy, text) for text in OF_SYMPY],
)
def test_arithmetic_is_evaluated_here(evaluate: Callable[[str], Any], text: str) -> None:
    expected = repr(evaluate(text))
    assert repr(watched(lambda: evaluate(text))) == expected


@pytest.mark.parametrize(
    ("evaluate", "text"),
    [(by_python, text) for text in REFUSED] + [(by_sympy, text) for text in REFUSED_BY_SYMPY],
)
def test_what_could_change_something_does_not_run(
    evaluate: Callable[[str], Any], text: str
) -> None:
    assert watched(lambda: (evaluate(text),)) is None


SIGNS = ("f", "int", "1", "(", "'", "+", "[", ".a")


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_no_text_of_these_signs_calls_what_it_should_not() -> None:
    """All texts of up to five of the signs that calls are made of, read by another grammar."""
    harmless = 0
    for size in range(1, 6):
        for signs in itertools.product(SIGNS, repeat=size):
            closing = (")" if sign == "(" else "]" for sign in reversed(signs) if sign in "([")
            text = "".join((*signs, *closing))
            try:
                tree = ast.parse(text, mode="eval")
            except SyntaxError:
                continue
            if not is_harmless(compile(tree, "<string>", "eval")):
                continue
            harmless += 1
            for node in ast.walk(tree):
                assert not isinstance(node, ast.Attribute | ast.Lambda), text
                if isinstance(node, ast.Subscript):  # 'int'[1] is a constant
                    assert isinstance(node.value, ast.Constant), text
    assert harmless > 500


def test_every_operation_is_of_this_python() -> None:
    """What a name of the list does not match is refused."""
    for text in ARITHMETIC:
        assert is_harmless(compile(text, "<string>", "eval"))
    assert not is_harmless(compile("a = 1", "<string>", "exec"))
    assert not is_harmless(compile("import os", "<string>", "exec"))


def test_a_scorer_that_takes_every_error_is_not_believed() -> None:
    """Neither its result, nor what it evaluates next."""
    ran: list[int] = []

    def score() -> float:
        for text in ("ran.append(1)", "[1]", "ran.append(2)"):
            with contextlib.suppress(BaseException):
                eval(text, {"ran": ran})
        return 1.0

    assert watched(score) is None and ran == []
    assert watched(lambda: 1.0) == 1.0
    eval("ran.append(3)")  # no longer watched
    assert ran == [3]


def test_errors_of_a_scorer_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        watched(lambda: eval("1/0"))
    eval("[].append(1)")


def test_a_scorer_may_import() -> None:
    sys.modules.pop("colorsys", None)
    assert watched(lambda: importlib.import_module("colorsys")) is sys.modules["colorsys"]


def rows(name: str, count: int) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"size": count, "seed": 1}
    dataset = reasoning_gym.create_dataset(name, **options)
    task_of = {"name": name, "options": options}
    return dataset, [(e["answer"], {"task": task_of, "entry": e}) for e in list(dataset)]


EVALUATE = (
    *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens",
        "number_sorting"),
    *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
        "string_insertion"),
)  # fmt: skip


@pytest.mark.parametrize("name", EVALUATE)
def test_right_answers_are_not_refused(name: str) -> None:
    for answer, metadata in rows(name, 5)[1]:
        for response in (answer, f"We get f(x) = {{42}}, so <answer>{answer}</answer>"):
            expected = task.score(response, None, metadata)
            assert watched(lambda r=response, m=metadata: task.score(r, None, m)) == expected  # type: ignore[misc]


@pytest.mark.parametrize("name", EVALUATE)
def test_a_name_of_one_letter_is_no_function_of_a_scorers_module(name: str) -> None:
    dataset, _ = rows(name, 1)
    known = vars(inspect.getmodule(type(dataset)))
    assert not [key for key, value in known.items() if len(key) == 1 and callable(value)]


def test_a_long_answer_is_refused() -> None:
    _, ((_, metadata),) = rows("chain_sum", 1)
    assert watched(lambda: task.score("1" * 10001, None, metadata)) is None
    assert watched(lambda: task.score("x" * 20000 + "<answer>1</answer>", None, metadata)) == 0.0
    assert task.score("1" * 10001, None, metadata) == 0.0
    evaluation.refuse()  # outside of `watched`: continues


def test_a_worker_refuses_what_would_run_code() -> None:
    _, ((_, metadata),) = rows("countdown", 1)
    of_tasks = rewards.get("task")
    assert worker._score(of_tasks, ("f(42)", None, metadata)) == {"value": 0.01}
    assert worker._score(of_tasks, ("f(42)", None, {})) == {"raised": ANY}
    assert worker._score(of_tasks, ("print(42)", None, metadata)) == {"refused": ANY}
    assert worker._score(rewards.get("exact_match"), ("eval('1')", "1", {})) == {"value": 0.0}
