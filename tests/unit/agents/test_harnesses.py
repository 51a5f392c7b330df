"""What common harnesses send and print: wishes about the form of an answer, output at the end, and
rewards of turns on the screen."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from slime_like.agents.command import run_command
from slime_like.agents.episode_samples import RETURN_MEAN, RETURN_STD, agent_metrics
from slime_like.agents.task import Task
from slime_like.batching.turn_credit import NUMBERS, SUMMED, TURNS
from slime_like.rewards.grader import Grader
from slime_like.rollout.failures import describe_failure
from slime_like.samples.groups import SampleGroup
from slime_like.text import LONGEST, both_ends
from slime_like.trainer.strategy import ReinforcementLearning
from tests.unit.agents.test_server import TOOLS, Engine, episodes, post, run, session_of, user
from tests.unit.rollout.test_metrics import make

FORCED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        ("chat/completions", {"tool_choice": "required"}),
        ("chat/completions", {"tool_choice": FORCED}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("chat/completions", {"response_format": SCHEMA}),
        ("responses", {"tool_choice": "required"}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("messages", {"tool_choice": {"type": "any"}}),
        ("messages", {"tool_choice": {"type": "tool", "name": "weather"}}),
    ],
)
def test_a_wish_about_the_form_is_no_command(path: str, wish: dict[str, Any]) -> None:
    """It is counted, as the client's temperature is."""
    engine = Engine("sunny", "sunny")
    session = session_of(engine)
    tool = TOOLS[0]["function"]
    body: dict[str, Any] = {"messages": [user("weather?")], "tools": TOOLS}
    if path == "responses":
        body = {"input": "weather?", "tools": [{"type": "function", **tool}]}
    elif path == "messages":
        tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
        body = {"messages": body["messages"], "max_tokens": 50, "tools": tools}

    async def talk(client: httpx.AsyncClient) -> None:
        await post(client, f"/v1/{path}", **body)
        assert session.counts["overridden"] == 0
        await post(client, f"/v1/{path}", **body, **wish)

    run(session, talk)
    assert session.counts["overridden"] == 1 and engine.prompts[0] == engine.prompts[1]


def test_why_a_program_failed_stands_at_the_end_of_its_output() -> None:
    line = "print('x' * 5000); raise SystemExit('the key of the service is missing')"

    async def play(task: Task) -> float | None:
        return await run_command([sys.executable, "-c", line], task)

    (sample,) = episodes(play, Engine(), 1)
    reason = sample.metadata["failure"]
    assert reason.startswith("--agent-function-path play raised RuntimeError: exit status 1")
    assert reason.endswith("the key of the service is missing") and len(reason) == LONGEST
    text = describe_failure(sample)
    assert text.startswith("sample 0: --agent-function-path") and "engine" not in text


def test_both_ends_of_a_text() -> None:
    assert both_ends("a" * 500) == "a" * 500
    text = both_ends("a" * 400 + "b" * 400)
    assert len(text) == 500 and text.startswith("aaa") and text.endswith("bbb") and " ... " in text


def test_rewards_of_turns_are_the_rewards_on_the_screen() -> None:
    """Where an estimator credits turns, the episode's own reward is 0 all the time."""
    numbers = {NUMBERS: {"answers": 2.0}}
    samples = [
        replace(make(i, 0.0), metadata={**numbers, TURNS: {SUMMED: False, "rewards": [i, 1.0]}})
        for i in (0, 2)
    ]
    summed = replace(
        make(4, 3.0), metadata={**numbers, TURNS: {SUMMED: True, "rewards": [1.0, 2.0]}}
    )
    metrics = agent_metrics([SampleGroup(0, (*samples, summed))])
    assert metrics[RETURN_MEAN] == pytest.approx((1 + 3 + 3) / 3)
    assert metrics[RETURN_STD] == pytest.approx(float(torch.tensor([1.0, 3, 3]).std(correction=0)))
    strategy = ReinforcementLearning(
        recorded=True,
        staleness=None,
        source="",
        max_failed=1.0,
        max_abs_reward=10.0,
        reward_trains=True,
    )
    found = strategy.check_samples(0, [*samples, summed], metrics, 1)
    assert found["rollout/reward_mean"] == metrics[RETURN_MEAN]
    assert found["rollout/reward_std"] == metrics[RETURN_STD] > 0
    assert RETURN_MEAN not in agent_metrics([SampleGroup(0, (summed,))])


def test_an_episode_of_turn_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(task: Task) -> float:
        await task.chat([user(task.prompt)])
        task.reward(0.5)
        return 0.0

    samples = episodes(play, Engine(), 2)
    assert [sample.reward for sample in samples] == [0.5, 0.5], "summed without a turn's estimator"
    assert RETURN_MEAN not in agent_metrics([SampleGroup(0, tuple(samples))])


def test_rewards_of_answers_do_not_replace_the_reward_function() -> None:
    """Of an agent that returns nothing, they are added to what the reward function says."""

    async def play(task: Task) -> float | None:
        await task.chat([user(task.prompt)])
        task.reward(0.5)
        task.reward(-0.25)
        return None if task.sample_id < 2 else 2.0

    samples = episodes(play, Engine("a", "a", "a"), 3)
    assert [sample.reward for sample in samples] == [None, None, 2.25]
    assert [sample.metadata[NUMBERS]["answer_rewards"] for sample in samples] == [0.25] * 3
    with Grader(rm_type="exact_match") as grader:
        assert [sample.reward for sample in grader.grade(samples)] == [1.25, 1.25, 2.25]
    with Grader(rm_type="zero") as grader:
        assert [sample.reward for sample in grader.grade(samples)] == [0.25, 0.25, 2.25]
