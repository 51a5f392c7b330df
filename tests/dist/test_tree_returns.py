"""Token estimators on trees: episodes with sequences on several data-parallel ranks give the
results of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks
from slime_like.advantages import AdvantageSettings, estimate_advantages
from tests.unit.advantages.test_tree_returns import forest

TARGET = "tests.dist.test_tree_returns:advantages"
SETTINGS = {
    "reinforce_plus_plus": AdvantageSettings(
        "reinforce_plus_plus", gamma=0.9, kl_coef=1.0, normalize=True
    ),
    "ppo": AdvantageSettings(
        "ppo", gamma=0.9, lambd=0.8, value_lambd=1.0, kl_coef=1.0, normalize=True
    ),
}


def advantages(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By estimator, advantages and returns of this rank's sequences, every `world_size`-th."""
    _, found = forest(4, arguments["cut"], empty=True)
    local = [k for k in range(len(found.local_indices)) if k % world_size == rank]
    result: dict[str, Any] = {"local": local}
    for name, settings in SETTINGS.items():
        output = estimate_advantages(
            settings,
            found.outcomes,
            local_indices=[found.local_indices[k] for k in local],
            sequences=[found.sequences[k] for k in local],
            masks=[found.masks[k] for k in local],
            kl=[found.penalties[k] for k in local],
            critic_values=[found.values[k] for k in local] if name == "ppo" else None,
            group=dist.group.WORLD,
        )
        result[name] = [[v.tolist() for v in own or []] for own in (output.values, output.returns)]
    return result


def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    for cut in ("turns", "paths"):
        (alone,) = run_ranks(TARGET, 1, tmp_path / f"{cut}1", {"cut": cut}, 60)
        both = run_ranks(TARGET, 2, tmp_path / f"{cut}2", {"cut": cut}, 60)
        for name in SETTINGS:
            for part in (0, 1):
                for rank in both:
                    for k, value in zip(rank["local"], rank[name][part]):
                        assert value == pytest.approx(alone[name][part][k], abs=1e-5)
            assert sum(len(rank[name][0]) for rank in both) == len(alone["local"])
