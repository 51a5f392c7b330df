"""Games of gymnasium as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from slime_like.environments.base import environment_maker
from slime_like.environments.gymnasium_text import GymnasiumText
from tests.unit.environments.test_base import ROW

HERE = Path(__file__)


class Echo(gymnasium.Env[str, str]):
    """Text in both directions."""

    observation_space: spaces.Space[str] = spaces.Text(9)
    action_space: spaces.Space[str] = spaces.Text(5, min_length=2, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"go {options}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action[::-1], 1.0, False, True, {}


def start(spec: str, seed: int = 3, **metadata: Any) -> tuple[GymnasiumText, str]:
    made = environment_maker(spec)()
    assert isinstance(made, GymnasiumText)
    return made, made.reset(seed=seed, row={**ROW, "metadata": metadata})


def test_a_frozen_lake_by_names_of_actions_is_gymnasiums() -> None:
    names = ("left", "down", "right", "up")
    spec = f"gymnasium:FrozenLake-v1?is_slippery=false&actions={','.join(names)}"
    ours, first = start(spec)
    assert first == "Play.\n\nAnswer with one of left, down, right, up.\n\n0"
    theirs = gymnasium.make("FrozenLake-v1", is_slippery=False)
    theirs.reset(seed=3)
    for name in ("down", "down", "right", "right", "down", "right"):
        found = ours.step(f"not up: I go <answer>{name.upper()}!</answer>")
        state, reward, over, _, _ = theirs.step(names.index(name))
        assert found == (str(state), reward, over)
    assert found[1:] == (1.0, True)


def test_what_is_drawn_is_text() -> None:
    lake, first = start("gymnasium:FrozenLake-v1?render_mode=ansi&is_slippery=false&map_name=4x4")
    assert "[S]FFF\nFHFH" in first and "Answer with a number from 0 to 3." in first
    assert "S[F]FF" in lake.step("I take 2")[0]


def test_the_same_seed_is_the_same_game() -> None:
    games = {seed: start("gymnasium:Blackjack-v1", seed)[1] for seed in range(8)}
    assert len(set(games.values())) > 3
    assert start("gymnasium:Blackjack-v1", 5)[1] == games[5]
    cards, _ = start("gymnasium:Blackjack-v1", 5)
    observation, reward, over = cards.step("0")
    assert over and reward in (-1, 0, 1) and observation.startswith("[")


@pytest.mark.parametrize("answer", ["", "up", "4", "-1", "<answer></answer>", "1" * 5000])
def test_no_action_changes_nothing(answer: str) -> None:
    lake, _ = start("gymnasium:FrozenLake-v1")
    words = "That is no action. Answer with a number from 0 to 3."
    assert lake.step(answer) == (words, 0.0, False)


def test_spaces_of_text_and_of_lists() -> None:
    echo, first = start(f"{HERE}:Echo", options={"a": 1})
    assert first.endswith("go {'a': 1}") and "text of 2 to 5 characters" in first
    assert echo.step(" <answer> abc </answer>") == ("cba", 1.0, True)
    assert echo.step("x")[2] is False
    car, _ = start("gymnasium:MountainCarContinuous-v0")
    position, reward, over = car.step("[0.5]")
    assert len(str(position).split(",")) == 2 and reward < 0 and not over
    for wrong in ("[0.5", "[9]", "[[1]]", "one", "NaN", "{}"):
        assert str(car.step(wrong)[0]).startswith("That is no action"), wrong


def test_names_of_actions_are_as_many_as_actions() -> None:
    for actions in ("a,b", "a,b,c,C"):
        with pytest.raises(ValueError, match="actions names"):
            environment_maker(f"gymnasium:FrozenLake-v1?actions={actions}")


def test_observations_of_any_space_are_json() -> None:
    class Many(Echo):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {"a": np.array([1, 2], np.int8), "b": (np.float32(0.5), "x", None)}, {}

    assert (
        GymnasiumText(Many())
        .reset(seed=1, row=ROW)
        .endswith('{"a": [1, 2], "b": [0.5, "x", null]}')
    )
