"""A reward: the share of letters in the response, plus 1 if it contains the label. It runs in
worker processes that can open neither files nor sockets, with a deadline for each sample."""

from collections.abc import Mapping
from typing import Any

from slime_like.rewards.registry import register_reward


def problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Why no response to this row can be scored, or None; called for every row before the run."""
    return None if isinstance(label, str) else "the label must be a string"


@register_reward("letters", problem, bounded=True, help="the share of letters.")
def letters(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    share = sum(character.isalpha() for character in response) / max(len(response), 1)
    return share + (label in response)
