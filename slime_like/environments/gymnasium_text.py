"""Gymnasium environments as text: observations as JSON or rendered text, actions by name or
number."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces

from slime_like.environments.interface import Step, TextEnvironment
from slime_like.rewards.task import extract_answer

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")


def gymnasium_maker(name: str, options: Mapping[str, Any]) -> Callable[[], TextEnvironment]:
    """As `environment_maker`. Creates and closes one environment, so that errors are raised early.

    Args:
        name: Gymnasium's id, such as ``FrozenLake-v1`` or ``module:Id-v0``.
        options: Options of `gymnasium.make`, and ``actions``: comma-separated names of a Discrete
            space's actions, in order. ``render_mode=ansi`` gives rendered observations.
    """
    options = dict(options)
    actions = options.pop("actions", None)
    names = None if actions is None else [part.strip() for part in str(actions).split(",")]

    def make() -> GymnasiumText:
        environment = gymnasium.make(name, disable_env_checker=True, **options)
        return GymnasiumText(environment, names)

    try:
        make().close()
    except ValueError:
        raise
    except Exception as error:  # of any environment's own code
        raise ValueError(f"{name} cannot be made: {type(error).__name__}: {error}"[:500]) from error
    return make


class GymnasiumText:
    """A Gymnasium environment as a `TextEnvironment`.

    The action is the content of the last ``<answer></answer>``, otherwise the whole turn. Discrete
    spaces: the last action name or whole number in it. Text: the text itself. Box, MultiDiscrete,
    MultiBinary: a JSON list. A turn without a legal action leaves the environment unchanged, has
    reward 0, and is answered with the legal actions.
    """

    def __init__(
        self, environment: gymnasium.Env[object, object], actions: Sequence[str] | None = None
    ) -> None:
        """Raises ValueError for an action space that has no text form, or if the number of names
        differs from the number of actions."""
        self._environment = environment
        self._space = space = environment.action_space
        self._names = None if actions is None else [name.lower() for name in actions]
        self._parse: Callable[[str], object]
        if isinstance(space, spaces.Discrete):
            self._parse = self._discrete
            first = int(space.start)
            last = int(space.start + space.n - 1)
            self.legal = f"a number from {first} to {last}"
            if actions is not None:
                if len(actions) != space.n or len(set(self._names or ())) != space.n:
                    raise ValueError(f"actions names {len(actions)}, the space has {space.n}")
                self.legal = "one of " + ", ".join(actions)
        elif actions is not None:
            raise ValueError(f"actions goes with a Discrete space alone; this is {space}")
        elif isinstance(space, spaces.Text):
            self._parse = str.strip
            self.legal = f"text of {space.min_length} to {space.max_length} characters"
        elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            self._parse = functools.partial(_array, dtype=space.dtype)
            self.legal = f"a JSON list within {space}"
        else:
            raise ValueError(f"actions of {space} cannot be given as text")

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        """The prompt, the legal actions and the first observation. ``options`` in the row's
        metadata are passed to the environment's reset."""
        options = row["metadata"].get("options")
        observation, _ = self._environment.reset(seed=seed, options=options)
        parts = (str(row["prompt"]), f"Answer with {self.legal}.", self._text(observation))
        return "\n\n".join(part for part in parts if part)

    def step(self, action: str) -> Step:
        parsed = self._action(extract_answer(action))
        if parsed is None:
            return f"That is no action. Answer with {self.legal}.", 0.0, False
        observation, reward, terminated, truncated, _ = self._environment.step(parsed)
        return self._text(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._environment.close()

    def _action(self, text: str) -> object:
        try:
            action = self._parse(text)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        return action if self._space.contains(action) else None

    def _discrete(self, text: str) -> np.int64:
        assert isinstance(self._space, spaces.Discrete)
        if self._names is None:
            return np.int64(_NUMBER.findall(text)[-1]) if _NUMBER.search(text) else _no_action(text)
        words = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
        named = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text.lower())
        return self._space.start + self._names.index(named[-1]) if named else _no_action(text)

    def _text(self, observation: object) -> str:
        if self._environment.render_mode == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._environment.render()))
        return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def _no_action(text: str) -> NoReturn:
    raise ValueError(f"no action in {text!r:.60}")


def _array(text: str, *, dtype: np.dtype | None) -> np.ndarray:
    return np.asarray(json.loads(text), dtype=dtype)


def _plain(value: object) -> object:
    """Convert an observation of any space to plain JSON types."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
