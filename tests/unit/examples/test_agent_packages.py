"""The agents of examples/agents against the gateway: one of the package pydantic-ai, and programs with
the vendors' packages. None of them knows how it is trained."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slime_like.agents.command import run_command
from slime_like.agents.rollouts import Task
from slime_like.import_utils import load_function
from slime_like.types import SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import Engine, episodes

EXAMPLES = ROOT / "examples" / "agents"
FAMILY = FAMILIES["qwen3"]
Play = Callable[[Task], Awaitable[Any]]


def calls(*arguments: Any) -> str:
    return call_text(FAMILY, [("add", each) for each in arguments])


def agent(name: str) -> Play:
    pytest.importorskip({"pydantic_ai_agent": "pydantic_ai"}.get(name, name.partition("_")[0]))
    if name == "pydantic_ai_agent":
        play: Play = load_function(f"{EXAMPLES / name}.py:play", "--agent-function-path")
    else:

        async def play(task: Task) -> Any:
            return await run_command([sys.executable, f"{EXAMPLES / name}.py"], task)

    async def labelled(task: Task) -> Any:
        task.label = "42"
        return await play(task)

    return labelled


@pytest.mark.parametrize(
    "name",
    [
        "pydantic_ai_agent",
        "openai_agent",
        pytest.param("anthropic_agent", marks=pytest.mark.extended),
    ],
)
def test_parallel_calls_thoughts_and_an_answer(name: str) -> None:
    """Three turns in one sequence: every token that the engine wrote, once, and nothing else."""
    engine = Engine(
        "<think>\ntwo parts\n</think>\n\nI add." + calls({"numbers": [6, 7]}, {"numbers": [8, 9]}),
        calls({"numbers": [13, 17, 12]}),
        "<think>\nso\n</think>\n\nIt is 42.",
    )
    (sample,) = episodes(agent(name), engine, 1, timeout_s=300)
    assert (sample.metadata.get("failure"), sample.reward) == (None, 1.0)
    assert "13" in engine.prompts[1] and "17" in engine.prompts[1] and "42" in engine.prompts[2]
    assert trained(sample) == [t for tokens in engine.written for t in tokens]
    numbers = sample.metadata["agent"]
    assert (numbers["answers"], numbers["foreign_messages"], numbers["tool_errors"]) == (3, 0, 0)
    assert not sample.branches


def test_a_wrong_answer_after_arguments_without_sense() -> None:
    engine = Engine(calls({"numbers": "x"}, {}), calls({"number": 1}), "It is 41.")
    (sample,) = episodes(agent("pydantic_ai_agent"), engine, 1, timeout_s=300)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0), sample.metadata
    sequences = [trained(each) for each in (sample, *sample.branches)]
    assert sum(map(len, sequences)) == sum(map(len, engine.written)), "each answer once"


def test_pydantic_ai_gives_up_without_losing_its_sample() -> None:
    """Calls of a tool that there is not, more often than its retries: no answer, and 0."""
    unknown = call_text(FAMILY, [("nothing", {"x": 1})])
    engine = Engine(*[unknown] * 9)
    (sample,) = episodes(agent("pydantic_ai_agent"), engine, 1, timeout_s=300)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0)
    assert 1 < sample.metadata["agent"]["answers"] < 9


def test_what_the_examples_share() -> None:
    result = load_function(f"{EXAMPLES}/arithmetic.py:result_of_add", "example")
    is_right = load_function(f"{EXAMPLES}/arithmetic.py:is_right", "example")
    assert result('{"numbers": [1, 2.5]}') == result({"numbers": [1, 2.5]}) == "3.5"
    for wrong in ("", "[1]", "{}", '{"numbers": 3}', '{"numbers": ["a"]}', '{"n": [1]}', "{"):
        assert result(wrong).startswith("error"), wrong
    assert is_right("it is 1,042", "1042") and not is_right("42 or 43", "42")
    assert not is_right("none", "42")
