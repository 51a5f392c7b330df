"""The words of a command line, before it is parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Protocol

from arguments.translate.names import SKYRL_PREFIX
from arguments.values import is_flag

_HYDRA = re.compile(r"\+{0,2}([A-Za-z][\w.]*)=(.*)", re.DOTALL)


class Flags(Protocol):
    """What a parser knows about names."""

    def is_flag_name(self, name: str) -> bool: ...

    def num_values(self, typed: str) -> float: ...


def values_marked(
    argv: Iterable[str], num_values: Callable[[str], float]
) -> Iterator[tuple[str, bool]]:
    """Each word, and whether it is a value of the flag before it, whatever it looks like.

    Args:
        num_values: How many of the words after a flag belong to it at most; infinity for lists.
    """
    left: float = 0
    for word in argv:
        if is_flag(word):
            left = 0 if "=" in word else num_values(word)
            yield word, False
            continue
        yield word, left > 0
        left -= 1


def translate_words(argv: Iterable[str], flags: Flags) -> list[str]:
    """Hydra's ``key=value`` and ``+key=value`` as ``--key=value``, unless it is a value of the flag
    before it or no flag's name."""
    words: list[str] = []
    for word, is_value in values_marked(argv, flags.num_values):
        pair = None if is_value else hydra_pair(word)
        if pair is not None and flags.is_flag_name(pair[0]):
            word = f"--{pair[0]}={pair[1]}"
        words.append(word)
    return words


def hydra_pair(word: str) -> tuple[str, str] | None:
    """Key and value of Hydra's ``key=value``; None for other words."""
    pair = _HYDRA.fullmatch(word)
    return None if pair is None else (pair[1], pair[2])


def without_skyrl_prefix(name: str, known: Container[str]) -> str:
    """``--trainer-algorithm-policy-loss-type`` -> ``--policy-loss-type``, unless the long name is a
    flag itself."""
    return name if name in known else SKYRL_PREFIX.sub("--", name)
