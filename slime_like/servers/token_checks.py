"""Checks of what a server answers: tokens, their log-probs and weight versions."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from slime_like.checked_json import InvalidResponse, StrictModel, WrongWeightVersion
from slime_like.engines.base import SamplingParams
from slime_like.text import shown


class VersionSpan(StrictModel):
    """Response tokens [start, end) of one weight version."""

    version: object
    start: int
    end: int


@contextlib.contextmanager
def of_request(rid: str) -> Iterator[None]:
    """Names the request in what is raised."""
    try:
        yield
    except InvalidResponse as error:
        raise type(error)(f"request {rid}: {error}") from None


def check_tokens(
    tokens: tuple[int, ...], sampling: SamplingParams, vocab_size: int, *, aborted: bool, key: str
) -> None:
    """Raises InvalidResponse. key: the field of the response that has the tokens."""
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise InvalidResponse(
            f"{key}[{tokens.index(largest)}] is {shown(largest, 40)}, not a token id from 0 to "
            f"{vocab_size - 1}"
        )
    if len(tokens) > sampling.max_new_tokens or (not tokens and not aborted):
        raise InvalidResponse(f"{len(tokens)} tokens, expected 1 to {sampling.max_new_tokens}")


def check_log_prob_tokens(reported: Sequence[int], tokens: tuple[int, ...]) -> None:
    """Check that there is a log-prob of each token. reported: the tokens that have one. Compared at
    once, because responses have thousands of tokens. Raises InvalidResponse."""
    if len(reported) != len(tokens):
        raise InvalidResponse(f"{len(reported)} log-probs for {len(tokens)} tokens")
    if tuple(reported) != tokens:
        place = next(i for i, (a, b) in enumerate(zip(reported, tokens, strict=True)) if a != b)
        raise InvalidResponse(
            f"the log-prob at {place} is of token {shown(reported[place], 40)}, and the token "
            f"there is {tokens[place]}"
        )


def weight_versions(
    spans: Sequence[VersionSpan], length: int, legal: Collection[int]
) -> tuple[int, ...]:
    """The weight version of each token: in `legal`, and not below that of the token before. Raises
    InvalidResponse, WrongWeightVersion."""
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or not span.start <= span.end <= length:
            raise InvalidResponse(
                f"weight versions of tokens {shown(span.start, 40)} to {shown(span.end, 40)} after "
                f"{len(versions)} of {length} tokens"
            )
        if span.start == span.end:
            continue
        version = _version(span.version)
        if version not in legal:
            names = ", ".join(map(str, sorted(legal))) or "none"
            raise WrongWeightVersion(
                f"weight version {shown(version, 40)}, and only {names} can have written it"
            )
        if versions and version < versions[-1]:
            raise WrongWeightVersion(f"weight version {version} after {versions[-1]}")
        versions += [version] * (span.end - span.start)
    if len(versions) != length:
        raise InvalidResponse(f"weight versions of {len(versions)} tokens for {length} tokens")
    return tuple(versions)


def _version(value: object) -> int:
    """Parse a weight version, an integer or its text. Raises WrongWeightVersion for other text,
    e.g. from a server that never received weights; InvalidResponse for other types."""
    if type(value) is int:
        return value
    if not isinstance(value, str):
        raise InvalidResponse(f"weight version {shown(value)}")
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise WrongWeightVersion(f"the weight version {shown(value)} was never sent")
    return int(value)
