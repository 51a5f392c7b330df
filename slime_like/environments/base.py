"""Text environments by name, for --agent-environment.

    gymnasium:FrozenLake-v1?is_slippery=false&actions=left,down,right,up
    openenv:http://127.0.0.1:8000?action=message
    path/to/file.py:Class?option=value          or module.Class?option=value
    single_turn

A class has the two methods of `TextEnvironment`, or is a `gymnasium.Env`. Options are keyword
arguments: JSON where a value is JSON (8, 0.5, false), else text.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from slime_like.environments.interface import Step, TextEnvironment
from slime_like.extras import pip_install
from slime_like.import_utils import load_function

FLAG = "--agent-environment"
GYMNASIUM = "gymnasium:"
OPENENV = "openenv:"
SINGLE_TURN = "single_turn"


class SingleTurn:
    """The row's prompt, one answer, and the run's reward function."""

    def reset(self, *, seed: int, row: Mapping[str, object]) -> str:
        return str(row["prompt"])

    def step(self, action: str) -> Step:
        return "", None, True


def environment_maker(spec: str) -> Callable[[], TextEnvironment]:
    """Parse --agent-environment; returns a factory that creates an environment per episode.

    Args:
        spec: See the module docstring.

    Raises:
        ValueError: The environment cannot be created.
    """
    name, _, query = spec.partition("?")
    options = parse_options(query)
    if name.startswith(GYMNASIUM):
        try:
            from slime_like.environments.gymnasium_text import gymnasium_maker
        except ImportError as error:
            raise ValueError(f"needs gymnasium ({error}): {pip_install('agents')}") from None
        return gymnasium_maker(name.removeprefix(GYMNASIUM), options)
    if name.startswith(OPENENV):
        try:
            from slime_like.environments.openenv import openenv_maker
        except ImportError as error:
            raise ValueError(f"needs websockets ({error}): {pip_install('agents')}") from None
        return openenv_maker(name.removeprefix(OPENENV), options)
    make: Callable[..., object] = SingleTurn
    if name != SINGLE_TURN:
        if "." not in name:
            classes = "module.Class, path/to/file.py:Class"
            legal = f"{GYMNASIUM}<id>, {OPENENV}<url>, {SINGLE_TURN}, {classes}"
            raise ValueError(f"names no environment; legal: {legal}")
        make = load_function(name, FLAG)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with these options: {error}") from None
    return functools.partial(_make, make, options)


def _make(make: Callable[..., Any], options: Mapping[str, object]) -> TextEnvironment:
    made = make(**options)
    if hasattr(made, "action_space"):
        from slime_like.environments.gymnasium_text import GymnasiumText

        return GymnasiumText(made)
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise ValueError(f"a {type(made).__name__} has no reset and step")
    environment: TextEnvironment = made
    return environment


def parse_options(query: str) -> dict[str, object]:
    """``a=1&b=text``. Raises ValueError for an option that is given twice, or has no value."""
    options: dict[str, object] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError(f"{query!r} must be name=value&name=value") from None
    for name, text in pairs:
        if name in options:
            raise ValueError(f"option {name!r} is given twice")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options
