"""Sanitise untrusted text (from rewards, engines, models) for logs, recordings and terminals."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

LONGEST = 500  # characters of a failure's reason
# seconds of a unit, its name, and the same of the next smaller one
DURATIONS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
SHOWN = 200  # characters of a bad value in a message
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A password may contain a "/"; a port is not a password
_USERINFO = re.compile(r"(?<=://)(?:[^/?#\s'\"]*|[^/?#\s'\":\[]*:(?!\d+[/?#])[^\s'\"]*)@")
_QUERY = re.compile(r"(?<=://)([^\s'\"?#]*\?)([^\s'\"#]+)")

# a variable or an option that holds a secret, in a command: API_KEY=..., --token ...
_NAMED = re.compile(
    r"(?<![\w-])((?:[A-Z0-9]+_)*(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|ACCESS_KEY_ID)="
    r"|--?(?:api[-_]?key|(?:auth[-_]|access[-_])?token|secret|password)(?:=| +))"
    r"(\"[^\"]*\"|'[^']*'|[^\s'\"]+)"
)


def clean(text: object, longest: int = LONGEST) -> str:
    """One line, without control characters, escape sequences, lone surrogates or URL credentials.

    Args:
        text: Any object; converted by ``str``.
        longest: Maximum number of characters.
    """
    line = mask_credentials(printable(" ".join(str(text)[: 4 * longest].split())))
    return line if len(line) <= longest else line[: longest - 3] + "..."


def shown(value: object, limit: int = SHOWN) -> str:
    """repr of a value for a message: one printable line of at most `limit` characters."""
    return repr(value[:limit] if isinstance(value, str) else value)[:limit]


def both_ends(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and its end: an error names itself first, and the output of a
    program says at its end why it failed."""
    if len(text) <= longest:
        return text
    first = longest // 4
    return f"{text[:first]} ... {text[first + 5 - longest :]}"


def list_names(names: Sequence[str], limit: int = 8) -> str:
    """The first names, comma-separated, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def duration(seconds: float) -> str:
    """A time as people say it, in its two largest units: 0.42 s, 1 min 36 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    for size, unit, smaller_size, smaller in DURATIONS:
        if seconds >= size:
            count, rest = divmod(round(seconds / smaller_size), size // smaller_size)
            return f"{count} {unit} {rest} {smaller}" if rest else f"{count} {unit}"
    raise AssertionError(seconds)


def common_prefix(a: str, b: str) -> str:
    pairs = enumerate(zip(a, b, strict=False))
    return a[: next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))]


def printable(text: str) -> str:
    """Escape newlines, control characters and lone surrogates (``\\x1b``, ``\\ud800``)."""
    return _UNFIT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def mask_credentials(text: str) -> str:
    """``https://user:secret@host`` becomes ``https://***@host``, for every URL in the text."""
    return _USERINFO.sub("***@", text)


def mask_url(url: str) -> str:
    """A URL without user, password and the values of its query, for logs and config dumps.

    >>> mask_url("https://user:secret@host/score?key=1")
    'https://***@host/score?key=***'
    """
    try:
        parts = urlsplit(mask_credentials(url))
    except ValueError:
        return "***"
    return urlunsplit(parts._replace(query=_without_values(parts.query)))


def _without_values(query: str) -> str:
    return re.sub(r"=[^&]*", "=***", query)


def mask_settings(value: object) -> Any:
    """Copy of JSON-like data with `mask_url` applied to every URL in every string, and without the
    values of variables and options that hold secrets.

    >>> mask_settings("env OPENAI_API_KEY=abc agent --url http://a:b@h/x")
    'env OPENAI_API_KEY=*** agent --url http://***@h/x'
    """
    if isinstance(value, str):
        text = _NAMED.sub(r"\1***", mask_credentials(value))
        return _QUERY.sub(lambda match: match[1] + _without_values(match[2]), text)
    if isinstance(value, dict):
        return {key: mask_settings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mask_settings(item) for item in value)
    return value


SECRETS = ("--wandb-key",)  # flags


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line that is safe to show: API keys and URL credentials are masked.

    >>> mask_argv(["--wandb-key", "abc", "--wandb_key=abc"])
    ['--wandb-key', '***', '--wandb_key=***']
    """
    shown: list[str] = []
    for i, word in enumerate(argv):
        name, sign, _ = word.partition("=")
        if name.replace("_", "-") in SECRETS and sign:
            shown.append(f"{name}=***")
        elif i and argv[i - 1].replace("_", "-") in SECRETS:
            shown.append("***")
        else:
            shown.append(mask_settings(word))
    return shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", to follow "no such ..."; empty if no known name is like the word."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
