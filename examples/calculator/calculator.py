"""A calculator tool: the model writes ``<calc>12 * (3 + 4)</calc>``, the environment appends
``<result>84</result>``, and the model continues.

    python train.py ... --custom-generate-function-path examples/calculator/calculator.py:generate
    --rm-type gsm8k

The tool's output is masked out of the loss. The model's text is never executed: `calculate` walks
the syntax tree of an expression of bounded size with numbers and four operations.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from slime_like.rollout.episode import Episode, Model

OPEN, CLOSE = "<calc>", "</calc>"
MOST_CALLS = 8
MOST_CHARACTERS, LARGEST = 200, 1e15
OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def generate(model: Model, episode: Episode) -> None:
    """Alternate model turns and calculator results, until a turn has no call or the length limit is
    reached."""
    for _ in range(MOST_CALLS):
        turn = await model.write(episode, stop=(CLOSE,))
        call = called(turn.text)
        if not turn.stopped or call is None:
            return
        episode.metadata["calculator_calls"] = episode.metadata.get("calculator_calls", 0) + 1
        if not episode.observe(f"<result>{calculate(call)}</result>"):
            return
    await model.write(episode)


def called(text: str) -> str | None:
    """The expression of the call that ends the turn, or None."""
    start = text.rfind(OPEN)
    return text[start + len(OPEN) : -len(CLOSE)] if start >= 0 and text.endswith(CLOSE) else None


def calculate(expression: str) -> str:
    """The value as text, or an error message."""
    if len(expression) > MOST_CHARACTERS:
        return f"error: longer than {MOST_CHARACTERS} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}"
    return f"{value:g}" if value != int(value) else str(int(value))


def _value(node: ast.expr) -> float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return _bounded(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not a sum, difference, product or quotient of numbers")


def _bounded(value: float) -> float:
    if not abs(value) <= LARGEST:
        raise ValueError("too large")
    return value
