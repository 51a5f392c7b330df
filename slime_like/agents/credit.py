"""Rewards of single turns of an episode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from slime_like.agents.messages import BadRequest
from slime_like.agents.sessions import Session
from slime_like.agents.tree import Branch, SessionTree
from slime_like.rollout.answer_credit import SUMMED


def add_reward(session: Session, value: Any, answer: Any = -1) -> None:
    """Add to the reward of one turn.

    Args:
        value: A finite number.
        answer: Index of the turn in the episode; negative: from the end.

    Raises:
        BadRequest: An invalid value, or no such turn.
    """
    turns = session.tree.turns
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # infinite, NaN or a huge integer
        raise BadRequest(f"the reward of an answer must be a finite number (given: {value!r:.60})")
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise BadRequest(f"answer must be a whole number (given: {answer!r:.60})")
    if not -len(turns) <= answer < len(turns):
        raise BadRequest(f"answer is {answer}; the episode has had {len(turns)} answers")
    turns[answer].reward += value


def answers_of(tree: SessionTree, branches: Sequence[Branch], *, summed: bool) -> dict[str, object]:
    """Metadata for `rollout/answer_credit.py`, as plain JSON. summed: the rewards of turns are
    added to the episode's reward."""
    return {
        SUMMED: summed,
        "parents": [-1 if turn.parent is None else turn.parent.number for turn in tree.turns],
        "rewards": [turn.reward for turn in tree.turns],
        "spans": [list(map(list, branch.spans)) for branch in branches],
    }
