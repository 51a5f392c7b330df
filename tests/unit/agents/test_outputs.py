"""What programs of episodes print is kept, and the worker without dependencies."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arguments.parse import parse_args
from slime_like.agents import outputs as outputs_module
from slime_like.agents.command import run_command
from slime_like.agents.outputs import FOLDER, MOST_BYTES, EpisodeOutputs
from slime_like.agents.rollouts import AgentGenerate
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.agents.task import Task
from slime_like.agents.tasks import TaskQueue
from slime_like.trainer.factory import make_strategy
from slime_like.types import Prompt, Sample, SampleStatus
from tests.paths import ROOT
from tests.unit.agents.test_server import END, Engine, model_of
from tests.unit.command_lines import complete

WORKER = ROOT / "examples" / "agents" / "worker.py"


def episode(number: int, *, evaluation: bool = False) -> Task:
    return Task(number, "p", None, {}, evaluation, "http://127.0.0.1:1", "k")


def test_output_is_kept_however_a_program_ends(tmp_path: Path) -> None:
    kept = EpisodeOutputs(tmp_path)

    async def run(line: str, task: Task, limit_s: float = 60.0) -> None:
        command = run_command(["sh", "-c", line], task, apart=False, outputs=kept)
        await asyncio.wait_for(command, limit_s)

    asyncio.run(run("echo well; echo bad >&2", episode(1)))
    with pytest.raises(RuntimeError, match="exit status 3"):
        asyncio.run(run("echo failed; exit 3", episode(2)))
    with pytest.raises(TimeoutError):
        asyncio.run(run("echo slow; sleep 60", episode(3), 1.0))
    asyncio.run(run("true", episode(4)))
    asyncio.run(run("echo of an evaluation", episode(1, evaluation=True)))
    found = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    assert found == {
        "sample_1.txt": "well\nbad\n",
        "sample_2.txt": "failed\n",
        "sample_3.txt": "slow\n",
        "evaluation_1.txt": "of an evaluation\n",
    }


def test_a_long_output_keeps_both_ends_and_old_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs_module, "KEPT", 2)
    kept = EpisodeOutputs(tmp_path)
    for number in (1, 2, 2, 3):
        with (tmp_path / "out").open("wb+") as file:
            file.write(b"first" + b"x" * (2 * MOST_BYTES) + b"last")
            file.flush()
            kept.write(episode(number), file.fileno())
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [path.name for path in files] == ["sample_2.txt", "sample_3.txt"]
    text = files[0].read_text()
    assert text.startswith("firstx") and text.endswith("xlast")
    assert f"[{MOST_BYTES + 9} bytes are left out]" in text
    assert len(text) < MOST_BYTES + 100


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("")
    kept = EpisodeOutputs(tmp_path)
    with (tmp_path / "out").open("wb+") as file, caplog.at_level(logging.WARNING):
        file.write(b"x")
        file.flush()
        for _ in range(2):
            kept.write(episode(1), file.fileno())
    assert caplog.text.count("output of an episode is not kept") == 1


def test_the_worker_without_dependencies(tmp_path: Path) -> None:
    """It waits until somebody listens, plays two episodes, and its output has nothing of either."""
    key = "a key of one of the workers"
    (tmp_path / "keys").write_text(key.replace(" ", "_") + "\n")
    tasks = TaskQueue({key.replace(" ", "_")}, 60.0, 10.0)
    gateway = Gateway("127.0.0.1", 0, max_body=10_000, tasks=tasks)
    generate = AgentGenerate(
        "--agent-worker-keys f", tasks.play, gateway, end_ids=frozenset({END}),
        limits=SessionLimits(), timeout_s=60.0, episodes=2, own_timeout=True,
    )  # fmt: skip

    async def both() -> list[Sample]:
        model = model_of(Engine())
        prompts = [Prompt(i, "question", (), label="l") for i in range(2)]
        samples = [Sample.empty(prompt, i) for i, prompt in enumerate(prompts)]
        playing = [
            asyncio.create_task(generate.respond(sample, model, evaluation=False))
            for sample in samples
        ]
        while not gateway.url:
            await asyncio.sleep(0.005)
        command = [sys.executable, "-S", str(WORKER), gateway.url, str(tmp_path / "keys")]
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "http_proxy": "http://x:1"}
            ) as worker,
        ):
            try:
                return await asyncio.wait_for(asyncio.gather(*playing), 60)
            finally:
                worker.kill()

    for sample in asyncio.run(both()):
        assert sample.status is not SampleStatus.ABORTED, sample.metadata
        assert sample.reward in (0.0, 1.0) and sample.response_length
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--agent-command", "true"],
        ["--agent-function-path", "{folder}/f.py:f"],
        ["--custom-generate-function-path", "{folder}/f.py:f"],
        ["--rollout-function-path", "{folder}/f.py:g"],
    ],
)
def test_rewards_of_agents_are_rewards(tmp_path: Path, words: list[str]) -> None:
    """--rm-type zero with an agent that grades itself, as documented: no warning of zero rewards,
    and the rules about rewards apply."""
    (tmp_path / "f.py").write_text("async def f(*args): ...\n\n\ndef g(*args): ...\n")
    words = [word.format(folder=tmp_path) for word in words]
    budget = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"]
    config = parse_args(complete(tmp_path, "--rm-type", "zero", *words, *budget), 1)
    assert "every reward is 0" not in "\n".join(config.warnings)
    assert not config.rewards_are_zero
    health = make_strategy(config).health
    assert health is not None and "no_reward" in health._rules


def test_rewards_that_are_zero_are_reported(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, "--rm-type", "zero"), 1)
    assert "every reward is 0" in "\n".join(config.warnings) and config.rewards_are_zero
