"""JSON written by processes that may be broken or hostile: bounded in size, depth and numbers.

`parse_json` reads the bytes; the small checks below take values out of the result. Both raise
BadAnswer with one printable line, whatever they are given. The same checks read the tokens of
answers and of recorded rollouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

MAX_DEPTH = 32  # of arrays and objects in each other
MAX_INT_DIGITS = 20  # with the sign: what 64 bits hold
LOWEST_LOG_PROB = -1e6  # far below what sampling or scoring meets, and exact enough in float32
HIGHEST_LOG_PROB = 1e-3  # rounding may lift a log-prob this far above 0
_SHOWN = 200  # characters of a bad value in a message


class BadAnswer(ValueError):
    """An answer with status 200 that is not what was asked for. The message is one line."""


class WrongVersion(BadAnswer):
    """Tokens under weights that were never sent, or that cannot have written them."""


def parse_json(data: bytes) -> object:
    """Decode JSON.

    Args:
        data: UTF-8; how many bytes there may be is the reader's business (`http.py`).

    Returns:
        The value. NaN and infinities are let through as floats: the checks of numbers refuse them.

    Raises:
        BadAnswer: no JSON, an integer of more than MAX_INT_DIGITS, or nesting beyond MAX_DEPTH.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_bounded_int)
    except BadAnswer:
        raise
    except RecursionError:
        raise BadAnswer(f"no JSON that is read here: nested deeper than {MAX_DEPTH}") from None
    except ValueError:
        raise BadAnswer(f"no JSON: {shown(data[:_SHOWN].decode('utf-8', 'replace'))}") from None
    if _is_deeper(value, MAX_DEPTH):
        raise BadAnswer(f"no JSON that is read here: nested deeper than {MAX_DEPTH}")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise BadAnswer(
            f"no JSON that is read here: an integer of {len(digits)} digits, {digits[:20]}..."
        )
    return int(digits)


def _is_deeper(value: object, limit: int) -> bool:
    """Whether containers are nested more than `limit` times. Iterative: depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        containers = [v for v in level if isinstance(v, list | dict)]
        if not containers:
            return False
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def shown(value: object, limit: int = _SHOWN) -> str:
    """A value for a message: its repr, which is one printable line, at most `limit` characters."""
    return repr(value[:limit] if isinstance(value, str) else value)[:limit]


def printable(text: str, limit: int = _SHOWN) -> str:
    """Text of somebody else's for a message or the log: one line without control characters and
    lone surrogates, at most `limit` characters."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:limit]
    )[:limit]


def object_of(value: object, what: str) -> dict[str, object]:
    """Raises BadAnswer for anything but an object."""
    if not isinstance(value, dict):
        raise BadAnswer(f"{what} is no object: {shown(value)}")
    return value


def list_of(value: object, what: str) -> list[object]:
    """Raises BadAnswer for anything but an array."""
    if not isinstance(value, list):
        raise BadAnswer(f"{what} is no list: {shown(value)}")
    return value


def text_of(value: object, what: str, max_length: int = 1000) -> str:
    """Raises BadAnswer for anything but a string of at most `max_length` characters."""
    if not isinstance(value, str) or len(value) > max_length:
        raise BadAnswer(f"{what} is no text of at most {max_length} characters: {shown(value)}")
    return value


def is_whole(value: object, low: int, high: int) -> TypeGuard[int]:
    """Whether value is an integer (no bool, no float) from `low` to `high`."""
    return type(value) is int and low <= value <= high


def whole_of(value: object, what: str, low: int, high: int) -> int:
    """Raises BadAnswer for anything but an integer from `low` to `high`."""
    if not is_whole(value, low, high):
        raise BadAnswer(f"{what} is {shown(value)}, must be a whole number from {low} to {high}")
    return value


def token_ids(values: Any, what: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a vocabulary. Raises BadAnswer naming the first that is none."""
    for i, value in enumerate(list_of(values, what)):
        if not is_whole(value, 0, vocab_size - 1):
            raise BadAnswer(
                f"{what} are no token ids: {shown(value, 40)} at {i}, and the vocabulary has 0 to "
                f"{vocab_size - 1}"
            )
    return tuple(values)


def log_prob(value: Any, what: str) -> float:
    """A finite log-prob that float32 holds. Raises BadAnswer."""
    legal = type(value) in (int, float) and math.isfinite(value)
    if not legal or not LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB:
        raise BadAnswer(
            f"{what} is {shown(value, 40)}, must be a number from {LOWEST_LOG_PROB:g} to 0"
        )
    return float(value)


def rising_versions(versions: Sequence[int], legal: Collection[int], what: str) -> tuple[int, ...]:
    """Weight versions of consecutive tokens: each `legal`, none older than the one before.

    Raises WrongVersion.
    """
    newest = None
    for version in versions:
        if version not in legal:
            names = ", ".join(map(str, sorted(legal))) or "none"
            raise WrongVersion(
                f"{what}: weight version {shown(version, 40)}, and only {names} can have written it"
            )
        if newest is not None and version < newest:
            raise WrongVersion(f"{what}: weight version {version} after {newest}")
        newest = version
    return tuple(versions)
