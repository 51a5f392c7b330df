"""Environments of the package verifiers, played by examples/agents/verifiers_worker.py: a program of
another Python, which claims the tasks of a run.

VERIFIERS_PYTHON names Pythons that have the package, with colons between them. Without it a stand-in
of its interface is played, so that claims, keys, rewards and errors are tested everywhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.agents.rollouts import AgentGenerate
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.agents.tasks import TaskQueue
from slime_like.types import Prompt, Sample, SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.e2e.programs import free_port
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import END, Engine, model_of

WORKER = ROOT / "examples" / "agents" / "verifiers_worker.py"
DATA = ROOT / "tests" / "data" / "verifiers"
KEY = "a-key-of-all-workers"
PYTHONS = [path for path in os.environ.get("VERIFIERS_PYTHON", "").split(":") if path]
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


def command(python: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """(words, environment variables) of the worker."""
    paths = [str(DATA)] if python in PYTHONS else [str(DATA), str(DATA / "stand_in")]
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}
    return [python, str(WORKER), *words], kept | {"PYTHONPATH": ":".join(paths)}


def environment_of(python: str) -> tuple[str, dict[str, Any]]:
    """The environment that a release has: its name, and its settings."""
    if python in PYTHONS:
        found = "import verifiers; print(hasattr(verifiers, 'load_environment'))"
        done = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True)
        if done.stdout.strip() == "False":
            return "say_twice_v1", LOCAL
    return "say_twice", {}


def rows(python: str, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    words, variables = command(python, "rows", name, "--settings", json.dumps(settings))
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def play(
    python: str, name: str, settings: dict[str, Any], engine: Engine, tasks: list[dict[str, Any]],
    folder: Path,
) -> list[Sample]:  # fmt: skip
    words, variables = command(python, "work", name, "--settings", json.dumps(settings))
    return play_by(words, variables, engine, tasks, folder)


def play_by(
    words: Sequence[str], variables: Mapping[str, str], engine: Engine, tasks: Sequence[Mapping[str, Any]],
    folder: Path,
) -> list[Sample]:  # fmt: skip
    """Episodes of rows, one after the other, so that the engine's texts have an order. words,
    variables: of the worker, which gets the gateway and its key."""
    (folder / "keys").write_text(KEY + "\n")
    queue = TaskQueue({KEY}, 300, 60)
    gateway = Gateway("127.0.0.1", free_port(), max_body=100_000, tasks=queue)
    generate = AgentGenerate(
        "--agent-worker-keys f", queue.play, gateway, end_ids=frozenset({END}), limits=SessionLimits(), timeout_s=300, episodes=1,
        own_timeout=True,
    )  # fmt: skip

    async def worker() -> None:
        while not gateway.url:
            await asyncio.sleep(0.005)
        more = ("--gateway", gateway.url, "--key-file", f"{folder}/keys", "--episodes", "1")
        with (folder / "worker.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *words, *more, env=variables, stdout=log, stderr=log, start_new_session=True
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def episodes_and_worker() -> list[Sample]:
        working = asyncio.create_task(worker())
        samples = [
            Sample.empty(Prompt(i, row["prompt"], (), label=row["label"], metadata=row["metadata"]), i)
            for i, row in enumerate(tasks)
        ]  # fmt: skip
        episodes = [generate.respond(each, model_of(engine), evaluation=False) for each in samples]
        playing = asyncio.gather(*episodes)
        try:
            both: set[asyncio.Future[Any]] = {working, playing}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            assert playing.done(), (folder / "worker.log").read_text()
            return playing.result()
        finally:
            working.cancel()
            await asyncio.gather(working, playing, return_exceptions=True)

    return asyncio.run(episodes_and_worker())


@pytest.mark.parametrize("python", [sys.executable, *PYTHONS])
def test_turns_rewards_and_errors(python: str, tmp_path: Path) -> None:
    """Two turns in one sequence, every token of the engine's trained once; the rubric's weighted sum;
    a row that breaks loses its own sample."""
    name, settings = environment_of(python)
    offered = rows(python, name, settings)
    words = ["red", "blue", "green", "fail"]
    assert [row["prompt"] for row in offered] == [f"Say {word}." for word in words]
    assert [row["label"] for row in offered] == words
    texts = ["red", "it is red", "blue", "what do I know", "no", "no, by no means at all", "x"]
    engine = Engine(*texts)
    samples = play(python, name, settings, engine, offered, tmp_path)
    assert [s.status for s in samples[:3]] == [SampleStatus.COMPLETED] * 3, [
        s.metadata.get("failure") for s in samples
    ]
    assert [s.reward for s in samples[:3]] == [1.5, 1.0, 0.0]
    assert samples[3].status == SampleStatus.ABORTED
    assert "this row breaks" in samples[3].metadata["failure"]
    for i, sample in enumerate(samples[:3]):
        written = engine.written[2 * i : 2 * i + 2]
        assert trained(sample) == [t for tokens in written for t in tokens]
        assert sample.metadata["agent"]["foreign_messages"] == 0 and not sample.branches
    assert "Say blue." in engine.prompts[3] and "Again." in engine.prompts[3]


def test_a_key_that_the_run_does_not_know(tmp_path: Path) -> None:
    """The worker ends, and says why."""
    (tmp_path / "keys").write_text("another key")

    async def refused() -> tuple[int, str]:
        gateway = Gateway("127.0.0.1", 0, max_body=1000, tasks=TaskQueue({KEY}, 60, 10))
        async with gateway.listening():
            words, variables = command(
                sys.executable, "work", "say_twice", "--gateway", gateway.url, "--key-file", f"{tmp_path}/keys"
            )  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *words, env=variables, stderr=asyncio.subprocess.PIPE
            )
            _, text = await asyncio.wait_for(process.communicate(), 300)
            return process.returncode or 0, text.decode()

    status, text = asyncio.run(refused())
    assert status != 0 and "does not know this worker's key" in text


@pytest.mark.parametrize("python", PYTHONS)
def test_an_environment_with_a_tool(python: str, tmp_path: Path) -> None:
    name, _ = environment_of(python)
    if name != "say_twice":
        pytest.skip("tools of a taskset are servers, which its harness asks")
    settings = {"kind": "tools"}
    call = call_text(FAMILIES["qwen3"], [("double", {"number": 21})])
    engine = Engine("I double." + call, "42")
    (sample,) = play(python, name, settings, engine, rows(python, name, settings), tmp_path)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0), sample.metadata
    assert "42" in engine.prompts[1] and "double" in engine.prompts[0]
    assert trained(sample) == [t for tokens in engine.written for t in tokens]
