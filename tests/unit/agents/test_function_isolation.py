"""Episodes of an agent function in processes of their own (--agent-function-isolation)."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from arguments.schema.agents import AgentsConfig
from slime_like.agents.factory import _make_agent
from slime_like.agents.rollouts import AgentGenerate
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.agents.test_harm import needs_namespaces
from tests.unit.agents.test_server import END, Engine, model_of
from tests.unit.command_lines import complete

SHARED = False
PROCESSES = True


@pytest.fixture
def episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Sample]]:
    """episodes(source, isolated, count, evaluation=..., **limits) -> the samples of episodes of the
    function `play` in `source`, which is in the working folder."""
    monkeypatch.chdir(tmp_path)

    def play(
        source: str, isolated: bool, count: int = 2, *, evaluation: bool = False, **limits: Any
    ) -> list[Sample]:
        name = f"agent_{len(list(tmp_path.glob('agent_*')))}.py"  # a file is imported once
        (tmp_path / name).write_text(textwrap.dedent(source))
        settings = AgentsConfig(
            agent_function_path=f"{name}:play", agent_function_isolation=isolated
        )
        agent = _make_agent(settings, tmp_path / "out")
        assert agent is not None
        generate = AgentGenerate(
            agent.name, agent.play, Gateway("127.0.0.1", 0, max_body=10_000),
            end_ids=frozenset({END}), limits=SessionLimits(**limits), timeout_s=60.0, episodes=8,
        )  # fmt: skip
        prompts = [Prompt(i, f"question {i}", (), label=f"{i}") for i in range(count)]
        samples = [Sample.empty(prompt, i) for i, prompt in enumerate(prompts)]
        return generate.run(samples, model_of(Engine()), evaluation=evaluation)

    return play


def reasons(samples: list[Sample]) -> str:
    return "\n".join(str(sample.metadata) for sample in samples)


def test_a_function_plays_as_in_the_process_of_the_run(
    episodes: Callable[..., list[Sample]],
) -> None:
    """Task, answers, rewards of turns, metadata, evaluation."""
    source = """
        import os
        from slime_like.agents.messages import BadRequest, ContextExceeded

        async def play(task):
            assert task.prompt == f"question {task.label}" and task.seed == task.sample_id + EVALUATION
            messages = [{"role": "user", "content": task.prompt}]
            first = (await task.chat(messages, max_tokens=20))["choices"][0]["message"]
            task.reward(0.25)
            messages += [first, {"role": "user", "content": "more"}]
            await task.chat(messages)
            try:
                await task.chat("no messages")
            except BadRequest as error:
                task.metadata["error"] = str(error)
            try:
                await task.chat(messages, stream=True)
            except BadRequest as error:
                task.metadata["stream"] = str(error)
            task.metadata["seen"] = [task.sample_id, task.evaluation, first["content"]]
            return 0.5
    """
    for evaluation in (False, True):
        text = source.replace("EVALUATION", str(2**30 * evaluation))
        shared, isolated = (
            episodes(text, way, evaluation=evaluation) for way in (SHARED, PROCESSES)
        )
        for ours, theirs in zip(shared, isolated, strict=True):
            assert ours.status is not SampleStatus.ABORTED, ours.metadata
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.loss_mask, theirs.loss_mask)
            assert (ours.reward, ours.metadata) == (theirs.reward, theirs.metadata)
            assert ours.reward == 0.75 and ours.metadata["seen"][1] is evaluation


def test_errors_of_the_gateway_are_those_of_the_session(
    episodes: Callable[..., list[Sample]],
) -> None:
    source = """
        async def play(task):
            found = []
            for text in ("a", "b", "word " * 1000):
                try:
                    await task.chat([{"role": "user", "content": text}])
                except Exception as error:
                    found.append(type(error).__name__)
            task.metadata["found"] = found
            return 1.0
    """
    for limits in ({"turns": 1}, {"positions": 100}):
        (shared,), (isolated,) = (episodes(source, way, 1, **limits) for way in (SHARED, PROCESSES))
        assert shared.metadata["found"] == isolated.metadata["found"]
        assert shared.metadata["found"][-1] in ("TooManyRequests", "ContextExceeded")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise ValueError('wrong')", "ValueError: wrong"),
        ("raise SystemExit(3)", "exit"),
        ("return '1.0'", "the agent returned str; return its reward, a number, or None"),
        ("task.metadata['x'] = object(); return 1", "is not JSON serializable"),
        ("import os; os.kill(os.getpid(), 9)", "exit status 137"),
    ],
)
def test_a_failure_is_the_samples_own(
    episodes: Callable[..., list[Sample]], end: str, reason: str
) -> None:
    chat = 'await task.chat([{"role": "user", "content": "a"}])'
    source = f"async def play(task):\n    {chat}\n    if task.sample_id: return 1.0\n    {end}\n"
    bad, good = episodes(source, PROCESSES)
    assert bad.status is SampleStatus.ABORTED and reason in reasons([bad])
    assert good.reward == 1.0


SPY = """
    import asyncio, gc, os

    async def play(task):
        await task.chat([{"role": "user", "content": "a"}])
        await asyncio.sleep(1.0)
        keys = {getattr(o, "api_key", None) for o in gc.get_objects()
                if type(o).__name__ in ("Task", "RemoteTask")} - {None}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = open(f"/proc/{pid}/environ", "rb").read().decode("latin1").split(chr(0))
            except OSError:
                continue
            keys |= {w.split("=", 1)[1] for w in words if w.startswith("OPENAI_API_KEY=")}
        task.metadata["others"] = len(keys - {task.api_key})
        return 1.0
"""


@needs_namespaces
def test_an_episode_sees_nothing_of_the_others(episodes: Callable[..., list[Sample]]) -> None:
    """Which it does in the process that they share, where it may see other programs' keys too."""
    shared = episodes(SPY, SHARED)
    assert all(s.metadata.get("others", 0) >= 1 for s in shared), reasons(shared)
    assert [s.metadata["others"] for s in episodes(SPY, PROCESSES)] == [0, 0]


def test_a_function_that_blocks_holds_up_no_other(episodes: Callable[..., list[Sample]]) -> None:
    source = """
        import time
        async def play(task):
            began = time.monotonic()
            await task.chat([{"role": "user", "content": "a"}])
            time.sleep(3.0)
            return time.monotonic() - began
    """
    began = time.monotonic()
    samples = episodes(source, PROCESSES, 6)
    assert all(s.reward is not None and s.reward < 9 for s in samples), reasons(samples)
    assert time.monotonic() - began < 60


def test_a_run_says_that_functions_share_its_process(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("async def f(task): ...\n")
    words = ["--agent-function-path", f"{tmp_path}/f.py:f", "--use-dynamic-batch-size"]
    argv = complete(tmp_path, *words, "--max-tokens-per-gpu", "4096")
    note = "episodes of --agent-function-path share this process"
    assert any(note in text for text in parse_args(argv, 1).notes)
    isolated = parse_args([*argv, "--agent-function-isolation"], 1)
    assert not any(note in text for text in isolated.notes)


def test_the_process_of_the_functions_has_no_secrets(
    episodes: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "s")
    source = """
        import os
        async def play(task):
            await task.chat([{"role": "user", "content": "a"}])
            task.metadata["found"] = "SOME_SECRET" in os.environ
            return 1.0
    """
    assert not episodes(source, PROCESSES, 1)[0].metadata["found"]
    assert os.environ["SOME_SECRET"] == "s"
