"""The largest legal magnitude of a reward (--max-abs-reward), whatever way the reward came."""

from __future__ import annotations

import math


def as_float(value: float) -> float:
    """The number as a float, infinite for an integer that no float holds, as JSON may have one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def beyond_limit(value: float | None, limit: float) -> str | None:
    """Why a reward is too large, or None. Rewards that are NaN or infinite have no magnitude: they
    are left out of the statistics. value: perhaps an integer that no float can hold."""
    if value is None or not abs(value) > limit:
        return None
    shown = as_float(value)
    if math.isinf(shown) and not isinstance(value, int):
        return None
    return (
        f"the reward {shown:g} is beyond --max-abs-reward {limit:g}; correct the reward, or raise "
        "the limit"
    )


def require_within(value: float | None, limit: float, place: str) -> None:
    """Raise ValueError for a reward that is too large. place: whose it is, for the message."""
    if reason := beyond_limit(value, limit):
        raise ValueError(f"{place}: {reason}")


def to_reward(value: float, place: str) -> float:
    """The number that a user function set as a reward, NaN if it is not finite. Raises ValueError
    for an integer that no float can hold."""
    try:
        reward = float(value)
    except OverflowError:
        raise ValueError(f"{place}: the reward is an integer that no float can hold") from None
    return reward if math.isfinite(reward) else math.nan
