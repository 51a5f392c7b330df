"""Parse and validate untrusted JSON, with bounds on size, depth and numbers.

`parse_json` decodes the bytes; the checks below extract typed values. For any input, an error is an
`InvalidResponse` with a one-line message. Recorded rollouts are checked by the same functions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

MAX_DEPTH = 32  # nesting of arrays and objects
MAX_INT_DIGITS = 20  # of a 64-bit integer, with its sign
LOWEST_LOG_PROB = -1e6  # far below any log-prob that occurs, and exact in float32
HIGHEST_LOG_PROB = 1e-3  # rounding may give a log-prob slightly above 0
_SHOWN = 200  # characters of a bad value in a message


class InvalidResponse(ValueError):
    """A response with status 200 but invalid content. The message is one line."""


class WrongWeightVersion(InvalidResponse):
    """Tokens with a weight version that was never sent or cannot have generated them."""


def parse_json(data: bytes) -> object:
    """Decode JSON.

    Args:
        data: UTF-8; its size is limited by the reader (`http.py`).

    Returns:
        The value. NaN and infinity are returned as floats; the checks of numbers reject them.

    Raises:
        InvalidResponse: Invalid JSON, an integer of more than MAX_INT_DIGITS digits, or nesting
            beyond MAX_DEPTH.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_bounded_int)
    except InvalidResponse:
        raise
    except RecursionError:
        raise InvalidResponse(f"JSON nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise InvalidResponse(
            f"invalid JSON: {shown(data[:_SHOWN].decode('utf-8', 'replace'))}"
        ) from None
    if _is_deeper(value, MAX_DEPTH):
        raise InvalidResponse(f"JSON nested deeper than {MAX_DEPTH} levels")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise InvalidResponse(f"JSON integer of {len(digits)} digits: {digits[:20]}...")
    return int(digits)


def _is_deeper(value: object, limit: int) -> bool:
    """Whether containers are nested more than `limit` times. Iterative: depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        containers = [v for v in level if isinstance(v, list | dict)]
        if not containers:
            return False
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return True


def shown(value: object, limit: int = _SHOWN) -> str:
    """repr of a value for a message: one printable line of at most `limit` characters."""
    return repr(value[:limit] if isinstance(value, str) else value)[:limit]


def printable(text: str, limit: int = _SHOWN) -> str:
    """Untrusted text for a message or the log: one line of at most `limit` characters, without
    control characters and lone surrogates."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:limit]
    )[:limit]


def object_of(value: object, what: str) -> dict[str, object]:
    """Raises InvalidResponse for anything but an object."""
    if not isinstance(value, dict):
        raise InvalidResponse(f"{what} is not an object: {shown(value)}")
    return value


def list_of(value: object, what: str) -> list[object]:
    """Raises InvalidResponse for anything but an array."""
    if not isinstance(value, list):
        raise InvalidResponse(f"{what} is not a list: {shown(value)}")
    return value


def text_of(value: object, what: str, max_length: int = 1000) -> str:
    """Raises InvalidResponse for anything but a string of at most `max_length` characters."""
    if not isinstance(value, str) or len(value) > max_length:
        raise InvalidResponse(
            f"{what} is not text of at most {max_length} characters: {shown(value)}"
        )
    return value


def is_int_between(value: object, low: int, high: int) -> TypeGuard[int]:
    """Whether value is an integer (no bool, no float) from `low` to `high`."""
    return type(value) is int and low <= value <= high


def int_of(value: object, what: str, low: int, high: int) -> int:
    """Raises InvalidResponse for anything but an integer from `low` to `high`."""
    if not is_int_between(value, low, high):
        raise InvalidResponse(f"{what} is {shown(value)}, must be an integer from {low} to {high}")
    return value


def token_ids(values: object, what: str, vocab_size: int) -> tuple[int, ...]:
    """Validate token ids. Raises InvalidResponse naming the first that is not in the vocabulary."""
    ids: list[int] = []
    for i, value in enumerate(list_of(values, what)):
        if not is_int_between(value, 0, vocab_size - 1):
            raise InvalidResponse(
                f"{what}: {shown(value, 40)} at {i} is not a token id from 0 to {vocab_size - 1}"
            )
        ids.append(value)
    return tuple(ids)


def log_prob(value: Any, what: str) -> float:
    """Validate a finite log-prob representable in float32. Raises InvalidResponse."""
    legal = type(value) in (int, float) and math.isfinite(value)
    if not legal or not LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB:
        raise InvalidResponse(
            f"{what} is {shown(value, 40)}, must be a number from {LOWEST_LOG_PROB:g} to 0"
        )
    return float(value)


def check_weight_versions(
    versions: Sequence[int], legal: Collection[int], what: str
) -> tuple[int, ...]:
    """Validate weight versions of consecutive tokens: each in `legal`, non-decreasing.

    Raises WrongWeightVersion.
    """
    newest = None
    for version in versions:
        if version not in legal:
            names = ", ".join(map(str, sorted(legal))) or "none"
            raise WrongWeightVersion(
                f"{what}: weight version {shown(version, 40)}, and only {names} can have written it"
            )
        if newest is not None and version < newest:
            raise WrongWeightVersion(f"{what}: weight version {version} after {newest}")
        newest = version
    return tuple(versions)
