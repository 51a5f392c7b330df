"""Which answers to a task are scored in a process of their own: those that could run something, of
scorers that could run it."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

import pytest

from slime_like.rewards.forked import may_call
from slime_like.rewards.registry import rewards

HARMLESS = (
    *("42", "x + 3*y**2", "-1.5e3", "[1, 2, 3]", "[[0, 1], [1, 0]]", "{1: (2, 3)}", "((1 + 2) * 3)"),
    *("x*(x + 1)", "2*(sin (x) + cos(2*x))", "exp(-x)*(1 - x)", "['a', \"b_c\"]", "['-69', '-13']"),
)  # fmt: skip
CALLS = (
    *("f(1)", "f (1)", "f\n(1)", "(f)(1)", "f[0](1)", "x!(2)", "f\t(1)", "f#+\n(1)", "asin(x)", "os.sin(x)", "3sin(x)"),
    *("'a'.upper()", "['a'](1)", "f'{x}'", "['(', 'x']", "x = 1", "x := 1", "a.b = 1", "[0 for a.b in [1]]"),
    *("lambda: 1", "__import__('os')", "@f", "x; y", "ｆ(1)", "'\\x28'", "exp(x)(y)", "eval 'x'", "(f )(1)", "exec(x)"),
    "1" * 10001,
)  # fmt: skip
EVALUATE = (
    *("binary_matrix", "bitwise_arithmetic", "codeio", "composite", "countdown", "intermediate_integration", "n_queens"),
    *("number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_numbers_lists_and_formulas_call_nothing(text: str) -> None:
    assert not may_call(text)
    called = [n for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Call)]
    assert all(isinstance(n.func, ast.Name) and n.func.id in {"sin", "cos", "exp"} for n in called)


@pytest.mark.parametrize("text", CALLS, ids=lambda text: text[:20])
def test_what_could_call_something_is_found(text: str) -> None:
    assert may_call(text)


def test_no_text_of_these_letters_calls_what_it_should_not() -> None:
    """All texts of up to five of the signs that calls are made of."""
    for size in range(1, 6):
        for signs in itertools.product("f1('+ [", repeat=size):
            text = "".join(signs) + "".join(")" if s == "(" else "]" for s in reversed(signs) if s in "([")  # fmt: skip
            if may_call(text):
                continue
            try:
                tree = ast.parse(text.strip(), mode="eval")
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    assert isinstance(node.func, ast.Constant | ast.Tuple | ast.List), text


def test_scorers_that_evaluate_are_told_from_those_that_compare() -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from slime_like.rewards.scorers import only_compares

    comparing = {name for name, row in DATASETS.items() if only_compares(row[0])}
    assert not comparing & set(EVALUATE)
    assert {"chain_sum", "spell_backward", "basic_arithmetic"} <= comparing
    assert len(comparing) > len(DATASETS) // 2
    for name in comparing:
        source = inspect.getsource(DATASETS[name][0].score_answer)
        assert not any(word in source for word in ("eval(", "exec(", "parse_expr", "sympify"))


def through_a_global(self: Any, answer: str) -> object:
    return EVALUATOR[0](answer)


def through_a_method(self: Any, answer: str) -> object:
    return self.helper(answer)


def wrapped(self: Any, answer: str) -> object:
    function = eval

    def inner() -> object:
        return function(answer)

    return inner()


def comparing(self: Any, answer: str) -> float:
    return max(float(len(part) > 1) for part in answer.strip().split(","))


EVALUATOR = [eval]


@pytest.mark.parametrize(
    ("scorer", "harmless"),
    [(through_a_global, False), (through_a_method, False), (wrapped, False), (comparing, True)],
)
def test_what_a_scorer_reaches_counts(scorer: Any, harmless: bool) -> None:
    from slime_like.rewards.scorers import only_compares

    class Dataset:
        score_answer = scorer

        def helper(self, answer: str) -> object:
            return eval(answer)

    assert only_compares(Dataset) is harmless


def test_a_row_without_a_task_is_scored_apart() -> None:
    """Its child says what is wrong with the row."""
    task = rewards.get("task")
    assert task.evaluates is not None
    assert task.evaluates("f(1)", {}) and not task.evaluates("1", {})
    assert task.evaluates("f(1)", {"task": {"name": "none", "options": {}}, "entry": {}})


def test_a_closure_is_taken_to_evaluate() -> None:
    """What it calls no name shows."""
    from slime_like.rewards.scorers import only_compares

    function = eval

    def score_answer(self: Any, answer: str) -> object:
        return function(answer)

    assert not only_compares(type("Dataset", (), {"score_answer": score_answer}))
