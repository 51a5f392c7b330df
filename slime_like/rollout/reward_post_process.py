"""What a user's function makes of the rewards of a whole rollout
(--custom-reward-post-process-path), in place of the comparison within groups.

Called on rank 0 as slime calls it: ``function(args, samples) -> (raw_rewards, rewards)``, samples
in the order of the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_like.compat.slime.samples import SlimeArgs, to_slime
from slime_like.distributed.collectives import from_rank_zero
from slime_like.import_utils import load_function
from slime_like.types import Sample

FLAG = "--custom-reward-post-process-path"


def processed_rewards(path: str, args: SlimeArgs, samples: Sequence[Sample]) -> Tensor:
    """[B] float64, NaN where a sample has no finite reward or the function gives none; equal on all
    ranks, a collective. The raw rewards that it returns are not looked at: those of the run are
    logged. Raises ValueError naming the function and what is wrong."""
    function = load_function(path, FLAG)

    def ask() -> list[float]:
        try:
            result = function(args, [to_slime(sample) for sample in samples])
        except Exception as error:
            raise ValueError(
                f"{FLAG} {path}: the function raised {type(error).__name__}: {error}"
            ) from error
        return read(result, path, len(samples))

    rewards = torch.tensor(from_rank_zero(ask), dtype=torch.float64)
    known = torch.tensor([s.reward is not None and math.isfinite(s.reward) for s in samples])
    return torch.where(known & torch.isfinite(rewards), rewards, math.nan)


def read(result: Any, path: str, count: int) -> list[float]:
    """The second of the two lists that the function returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{FLAG} {path}: the function returned {type(result).__name__}; return (raw_rewards, rewards)"
        )
    values = result[1].tolist() if hasattr(result[1], "tolist") else list(result[1])
    if len(values) != count or len(list(result[0])) != count:
        raise ValueError(
            f"{FLAG} {path}: {len(list(result[0]))} raw rewards and {len(values)} rewards; the rollout has {count} samples"
        )
    wrong = [
        value
        for value in values
        if value is not None and (isinstance(value, str) or not isinstance(value, int | float))
    ]
    if wrong:
        raise ValueError(f"{FLAG} {path}: a reward is {type(wrong[0]).__name__}, must be a number")
    return [math.nan if value is None else float(value) for value in values]
