"""Text environments by name, and the agent that plays them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_like.agents.environment import player
from slime_like.agents.rollouts import AgentGenerate
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.agents.task import seed_of
from slime_like.environments.base import environment_maker
from slime_like.environments.interface import Step, TextEnvironment
from slime_like.types import ANSWER_REWARDS, Prompt, Sample, SampleStatus
from tests.unit.agents.test_server import END, Engine, model_of

ROW: Mapping[str, Any] = {"prompt": "Play.", "label": None, "metadata": {}, "evaluation": False}
HERE = Path(__file__)


class Counter:
    """Over when the action is the number of steps; each step earns a half."""

    def __init__(self, until: int = 2, hang: threading.Event | None = None) -> None:
        self.until, self.hang, self.steps = until, hang, 0
        self.threads = {threading.get_ident()}
        self.closed = threading.Event()

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        self.threads.add(threading.get_ident())
        row["metadata"]["seed_seen"] = seed
        assert row["messages"] == [{"role": "user", "content": row["prompt"]}]
        assert row["images"] == []  # see unit/data/test_agent_prompts.py
        return f"{row['prompt']} {seed}"

    def step(self, action: str) -> Step:
        self.threads.add(threading.get_ident())
        if self.hang is not None:
            self.hang.wait()
        self.steps += 1
        return f"step {self.steps}", 0.5, self.steps == self.until

    def close(self) -> None:
        self.closed.set()


class AsyncOnce:
    """Leaves its reward to the run's reward function."""

    async def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return "say"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        return "", None, True


class Exhausted:
    """Has no second question, so that its step raises StopIteration."""

    def __init__(self) -> None:
        self.questions = iter(["first"])

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        return next(self.questions)

    def step(self, action: str) -> Step:
        return next(self.questions), 1.0, False


class Broken(AsyncOnce):
    async def step(self, action: str) -> Any:
        return "no tuple of three"


def played(
    make: Callable[[], TextEnvironment],
    engine: Engine,
    *,
    by_turn: bool = False,
    evaluation: bool = False,
    timeout_s: float = 60.0,
    **limits: int,
) -> Sample:
    generate = AgentGenerate(
        "environment", player(make), Gateway("127.0.0.1", 0, max_body=10_000), end_ids=frozenset({END}),
        limits=SessionLimits(**limits), timeout_s=timeout_s, episodes=2, by_turn=by_turn,
    )  # fmt: skip
    empty = Sample.empty(Prompt(7, "question", ()), 15)
    return asyncio.run(generate.respond(empty, model_of(engine), evaluation=evaluation))


def test_an_episode_keeps_every_token_and_gives_each_answer_its_reward() -> None:
    engine = Engine("<think>\nhm\n</think>\n\nfirst", "second")
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter())
        return made[-1]

    sample = played(make, engine, by_turn=True)
    response = sample.tokens[sample.prompt_length :][sample.loss_mask].tolist()
    assert response == [t for tokens in engine.written for t in tokens]
    assert "question 7" in engine.prompts[0] and "step 1" in engine.prompts[1]
    assert sample.metadata["agent_answers"]["rewards"] == [0.5, 0.5] and sample.reward == 0
    assert sample.metadata["agent"]["answer_rewards"] == 1 and not sample.branches
    assert made[0].closed.wait(20), "closed at the end"
    assert len(made[0].threads) == 1 and threading.get_ident() not in made[0].threads


@pytest.mark.parametrize(("by_turn", "evaluation"), [(False, False), (True, True)])
def test_an_estimator_of_episodes_and_an_evaluation_see_the_sum(
    by_turn: bool, evaluation: bool
) -> None:
    sample = played(Counter, Engine(), by_turn=by_turn, evaluation=evaluation)
    assert sample.reward == 1
    assert sample.metadata["seed_seen"] == (2**30 + 7 if evaluation else 7)


def test_no_more_room_or_turns_end_an_episode_as_it_is() -> None:
    sample = played(lambda: Counter(until=9), Engine(), turns=3)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.5)
    sample = played(lambda: Counter(until=999), Engine(*["word " * 60] * 40))
    assert sample.status == SampleStatus.TRUNCATED and sample.reward and sample.reward > 0.5
    assert sample.response_length <= 500
    engine = Engine(*["word " * 60] * 2)
    assert played(Counter, engine, tokens=3).reward == 1
    assert [len(tokens) for tokens in engine.written] == [3, 3]


def test_an_async_environment_leaves_the_reward_to_the_reward_function() -> None:
    sample = played(AsyncOnce, Engine("yes"))
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, None)


def test_rewards_of_steps_leave_the_last_one_to_the_reward_function() -> None:
    class Half(Counter):
        def step(self, action: str) -> Step:
            text, reward, done = super().step(action)
            return text, None if done else reward, done

    for evaluation in (False, True):
        sample = played(Half, Engine(), evaluation=evaluation)
        assert (sample.reward, sample.metadata[ANSWER_REWARDS]) == (None, 0.5)
    sample = played(Half, Engine(), by_turn=True)
    assert sample.reward is None and ANSWER_REWARDS not in sample.metadata


def test_what_an_environment_does_wrong_costs_its_own_sample() -> None:
    sample = played(Broken, Engine())
    assert sample.status == SampleStatus.ABORTED
    assert "return (text, reward, done)" in sample.metadata["failure"]
    sample = played(Exhausted, Engine(), timeout_s=20)
    assert "raised RuntimeError: StopIteration" in sample.metadata["failure"]
    hang = threading.Event()
    made = Counter(hang=hang)
    sample = played(lambda: made, Engine(), timeout_s=0.5)
    assert "took longer than --agent-timeout-s 0.5" in sample.metadata["failure"]
    assert not made.closed.is_set(), "its thread is not waited for"
    hang.set()
    assert made.closed.wait(20)


def test_seeds_are_those_of_the_prompt() -> None:
    sample = Sample.empty(Prompt(7, "", (), metadata={"seed": 3}), 1)
    assert seed_of(sample, evaluation=True) == 3
    for wrong in (-1, 2**31, True, "3"):
        bad = Sample.empty(Prompt(7, "", (), metadata={"seed": wrong}), 1)
        with pytest.raises(ValueError, match="must be 0 to"):
            seed_of(bad, evaluation=False)


def test_a_row_is_an_environment_of_one_answer() -> None:
    made = environment_maker("single_turn")()
    assert made.reset(seed=1, row=ROW) == "Play." and made.step("x") == ("", None, True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "names no environment; legal: gymnasium:<id>, openenv:<url>, single_turn"),
        ("gymnasium:FrozenLake-v9", "FrozenLake"),
        ("gymnasium:FrozenLake-v1?nothing=1", "nothing"),
        ("gymnasium:FrozenLake-v1?a", "must be name=value"),
        ("gymnasium:FrozenLake-v1?a=1&a=2", "given twice"),
        ("json.nothing", "has no 'nothing'"),
        ("single_turn?a=1", "cannot be made with these options"),
        (f"{HERE}:Counter?many=1", "cannot be made with these options"),
    ],
)
def test_what_is_no_environment_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        environment_maker(spec)


def test_what_has_no_reset_and_step_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="a Namespace has no reset and step"):
        environment_maker("argparse.Namespace")()
