"""Fields of `Outcomes` that not every run has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from slime_like.advantages import EpisodeTurns, RewardParts
from slime_like.lazy import Tensor


class OutcomeFields(TypedDict, total=False):
    """Fields of `Outcomes` that not every run has."""

    processed: Tensor
    parts: RewardParts
    turns: Sequence[EpisodeTurns | None]
    penalties: Tensor
