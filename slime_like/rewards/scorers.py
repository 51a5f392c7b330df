"""Which of reasoning-gym's scorers can only compare a text, whatever it holds.

Some scorers evaluate the answer as Python or sympy, so answers that could call something are scored
in a fork of a process with a hundred megabytes, many times what most scorers cost. Scorers that
cannot evaluate need none: every name that their code mentions, and what it calls in turn, must be
one of `_HARMLESS`. What is not known is taken to evaluate.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_TYPES = "bool dict float int list set str tuple"
_FUNCTIONS = "abs all any chr enumerate isinstance len map max min next ord range reversed round sorted sum zip"
_NUMBERS = "Decimal Fraction adjusted complex exp is_zero isclose prod quantize"
_ERRORS = "AttributeError Exception IndexError JSONDecodeError KeyError TypeError ValueError ZeroDivisionError"
_OF_TEXTS = "endswith isdigit isnumeric join lower lstrip replace rstrip split splitlines startswith strip upper"
_OF_CONTAINERS = "add append extend get index intersection items keys pop remove update values"
_OF_MODULES = "IGNORECASE dumps findall fullmatch group groups json loads match math re search"
_HARMLESS = frozenset(
    " ".join(
        (_TYPES, _FUNCTIONS, _NUMBERS, _ERRORS, _OF_TEXTS, _OF_CONTAINERS, _OF_MODULES)
    ).split()
)


@functools.cache
def only_compares(dataset: Any) -> bool:
    """Whether the scorer of this class of reasoning-gym cannot execute any text."""
    return _is_harmless(dataset.score_answer, dataset, set())


def _is_harmless(function: FunctionType, owner: type, seen: set[Callable[..., object]]) -> bool:
    """Whether the code of `function`, a method of `owner` or called by one, and what that calls
    mention nothing but harmless names."""
    seen.add(function)
    if function.__code__.co_freevars:  # a wrapper calls what no name shows
        return False
    for name in _names(function.__code__):
        found = _meant(name, function, owner)
        if isinstance(found, FunctionType):
            if found not in seen and not _is_harmless(found, owner, seen):
                return False
        elif not (name in _HARMLESS or _is_own_module(found)):
            return False
    return True


def _meant(name: str, function: FunctionType, owner: type) -> object:
    """What a name in the code of `function` can be: its global, a member of `owner`, or a function
    of one of reasoning-gym's modules; None where it is none of them."""
    known = function.__globals__
    if name in known:
        return known[name]
    for place in (owner, *filter(_is_own_module, known.values())):
        found = inspect.getattr_static(place, name, None)
        found = getattr(found, "__func__", found)  # of static methods
        if isinstance(found, FunctionType):
            return found
    return None


def _is_own_module(found: object) -> bool:
    return isinstance(found, ModuleType) and found.__name__.startswith("reasoning_gym")


def _names(code: CodeType) -> Iterator[str]:
    """Global names and attributes, those of functions within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
