"""The words of a command line, before it is parsed."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Protocol

from arguments.translate.names import SKYRL_PREFIX
from arguments.values import is_flag

_HYDRA = re.compile(r"\+{0,2}([A-Za-z][\w.]*)=(.*)", re.DOTALL)


class Flags(Protocol):
    """What a parser knows about names."""

    def is_flag_name(self, name: str) -> bool: ...

    def takes_value(self, typed: str) -> bool: ...


def translate_words(argv: Iterable[str], flags: Flags) -> list[str]:
    """Hydra's ``key=value`` and ``+key=value`` as ``--key=value``, unless it is the value of the
    flag before it or no flag's name."""
    words: list[str] = []
    is_value = False
    for word in argv:
        pair = None if is_value else hydra_pair(word)
        if pair is not None and flags.is_flag_name(pair[0]):
            word = f"--{pair[0]}={pair[1]}"
        words.append(word)
        is_value = is_flag(word) and "=" not in word and flags.takes_value(word)
    return words


def hydra_pair(word: str) -> tuple[str, str] | None:
    """Key and value of Hydra's ``key=value``; None for other words."""
    pair = _HYDRA.fullmatch(word)
    return None if pair is None else (pair[1], pair[2])


def without_skyrl_prefix(name: str, known: Container[str]) -> str:
    """``--trainer-algorithm-policy-loss-type`` -> ``--policy-loss-type``, unless the long name is a
    flag itself."""
    return name if name in known else SKYRL_PREFIX.sub("--", name)
