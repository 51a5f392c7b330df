"""Scorers that evaluate a model's text: code is checked before it runs.

CPython calls an audit hook (PEP 578) with every code object that is about to run. Code that only
computes is run; anything else aborts the scoring, and the answer is scored like an empty one: code
of an answer could write its own score in whatever process it runs. It need not be known which
scorers evaluate text.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

Result = TypeVar("Result")

# Opcodes of expressions without attributes, subscripts, lambdas, keyword arguments and
# assignments, in CPython 3.11 to 3.14
_OPERATIONS = """
    CACHE EXTENDED_ARG RESUME NOT_TAKEN PUSH_NULL PRECALL CALL LOAD_NAME LOAD_CONST LOAD_SMALL_INT
    RETURN_VALUE RETURN_CONST UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT BINARY_OP
    COMPARE_OP IS_OP CONTAINS_OP BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP
    LIST_EXTEND SET_UPDATE
"""
_HARMLESS = frozenset(dis.opmap[name] for name in _OPERATIONS.split() if name in dis.opmap)
# above: in-place, subscript
_BINARY = dis.opmap["BINARY_OP"]
_PLAIN_OPERATORS = 13
# Names that may be used and called: these functions of sympy and Python only compute. One-letter
# names are a task's unknowns, or sympy's constants and functions.
_NAMES = frozenset(
    [
        "Integer",
        "Float",
        "Rational",
        "Symbol",
        "Function",
        "pi",
        "oo",
        "zoo",
        "nan",
        "Abs",
        "abs",
        "sign",
        "floor",
        "ceiling",
        "factorial",
        "binomial",
        "gcd",
        "lcm",
        "Integral",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "max",
        "min",
        "round",
        "int",
        "float",
        "sum",
        "exp",
        "log",
        "ln",
        "sqrt",
        "cbrt",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
    ]
)
_OF_SYMPY = compile("from sympy import *", "<string>", "exec")  # for names in `parse_expr`


class _Refused(BaseException):
    """Aborts a scoring; a BaseException, so scorers do not catch it."""


class _Watch:
    """State of the audit hook."""

    on = False  # code is checked
    refused = False  # some code was rejected
    hooked = False


def watched(score: Callable[[], Result]) -> Result | None:
    """The result of `score`; None if it called `refuse`, or would have run code that is not known
    to be harmless."""
    if not _Watch.hooked:
        sys.addaudithook(_hook)
        _Watch.hooked = True
    _Watch.on = True
    _Watch.refused = False
    try:
        result = score()
    except _Refused:
        return None
    finally:
        _Watch.on = False
    return None if _Watch.refused else result


def refuse() -> None:
    """Abort this scoring."""
    if _Watch.on:
        _Watch.refused = True
        raise _Refused


def is_harmless(code: CodeType) -> bool:
    """Whether this code only computes a value from its names and constants, without side
    effects."""
    operations = code.co_code
    return (
        _HARMLESS.issuperset(operations[::2])
        and all(name in _NAMES or len(name) == 1 for name in code.co_names)
        and not any(
            operation == _BINARY and operator >= _PLAIN_OPERATORS
            for operation, operator in zip(operations[::2], operations[1::2], strict=True)
        )
        and ("Function" not in code.co_names or _only_names_functions(code))
    )


def _only_names_functions(code: CodeType) -> bool:
    """Whether sympy's `Function` is only used as in Function('f'); more arguments would define a
    class with bases and methods."""
    steps = [
        step
        for step in dis.get_instructions(code)
        if step.opname not in ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG")
    ]
    for function, name, call in zip(steps, steps[1:], steps[2:]):
        if (function.opname, function.argval) != ("LOAD_NAME", "Function"):
            continue
        if name.opname != "LOAD_CONST" or not isinstance(name.argval, str):
            return False
        if (call.opname, call.arg) != ("CALL", 1):
            return False
    return True


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event != "exec" or not _Watch.on:
        return
    (code,) = args
    assert isinstance(code, CodeType), "what runs is a code object"
    module = not code.co_filename.startswith("<")  # of an imported file
    if _Watch.refused or not (module or code == _OF_SYMPY or is_harmless(code)):
        refuse()
