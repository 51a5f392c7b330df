"""User-defined rewards: ``module.function`` or ``path/to/file.py:function``, called as
``function(args, sample)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_like import import_utils
from slime_like.function_args import NO_SETTINGS, FunctionArgs


@dataclass(frozen=True)
class RewardArgs:
    """Read-only settings, the first argument of a custom function, named as the flags."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    rm_timeout_s: float = 10.0
    max_abs_reward: float = 1e6
    group_rm: bool = False
    rm_url: str | None = None
    rm_concurrency: int | None = None
    rm_cache_size: int = 0
    # of the whole run; those of the reward may be an evaluation set's
    settings: FunctionArgs = NO_SETTINGS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "settings" not in vars(self):  # of pickle
            raise AttributeError(name)
        return getattr(self.settings, name)


def load_function(path: str, flag: str = "--custom-rm-path") -> Callable[..., Any]:
    """Load a function, see `slime_like.import_utils`. An exception in it, or an exit, is reported
    as the reward's failure."""
    return import_utils.load_function(path, flag, may_exit=True)


def is_async(function: Callable[..., object]) -> bool:
    """Whether calls return an awaitable: an ``async def``, or an object with an async
    ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
