"""Tasks of Harbor, made by `harbor init`, in an environment of namespaces."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime_like.types import Sample, SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.environments.conftest import python_of
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import Engine
from tests.unit.examples.test_verifiers_worker import play_by

WORKER = ROOT / "examples" / "agents" / "harbor_worker.py"
TESTS = """#!/bin/bash
if [ "$(cat /app/sum.txt)" = 6 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def made_task(python: Path, folder: Path) -> Path:
    """What `harbor init` makes, with an instruction and a test."""
    words = [str(python.parent / "harbor"), "init", "demo/sum", "--task", "--verifier-mode", "shared", "--no-pytest", "-o", str(folder)]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True, env=variables())
    task = folder / "sum"
    (task / "instruction.md").write_text("Write 6 into /app/sum.txt.\n")
    (task / "tests" / "test.sh").write_text(TESTS)
    return task


def variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}


def play(python: Path, engine: Engine, tasks: list[Path], folder: Path) -> list[Sample]:
    done = subprocess.run(
        [python, WORKER, "rows", *tasks],
        capture_output=True,
        text=True,
        env=variables(),
        check=True,
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.split("\n") if line]
    assert [row["prompt"] for row in rows] == ["Write 6 into /app/sum.txt."] * len(tasks)
    words = [str(python), str(WORKER), "work", "--environment", "harbor_namespaces:NamespaceEnvironment"]  # fmt: skip
    return play_by(words, variables(), engine, rows, folder)


def shell(command: str) -> str:
    return call_text(FAMILIES["qwen3"], [("shell", {"command": command})])


@pytest.fixture
def python() -> Path:
    if subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    return python_of("harbor")


def test_a_policy_with_a_shell_is_graded_by_the_tasks_test(python: Path, tmp_path: Path) -> None:
    """Files stay for the next command; every token of the policy's is trained once."""
    task = made_task(python, tmp_path)
    engine = Engine(
        shell("echo 5 > sum.txt; pwd"), shell("cat sum.txt; exit 3"), "done",
        shell("echo 6 > /app/sum.txt"), "done",
    )  # fmt: skip
    wrong, right = play(python, engine, [task, task], tmp_path)
    assert wrong.status == right.status == SampleStatus.COMPLETED, wrong.metadata
    assert (wrong.reward, right.reward) == (0.0, 1.0)
    assert "/app" in engine.prompts[1] and "5\n\n(exit code 3)" in engine.prompts[2]
    assert trained(wrong) == [t for tokens in engine.written[:3] for t in tokens]
    assert trained(right) == [t for tokens in engine.written[3:] for t in tokens]


def test_a_policy_sees_no_file_of_others_and_changes_none(python: Path, tmp_path: Path) -> None:
    """Nor by a link where the verifier's files are fetched from."""
    secret = tmp_path / "secret"
    secret.write_text("1")
    task = made_task(python, tmp_path)
    (task / "tests" / "test.sh").write_text("#!/bin/bash\n")  # leaves the policy's reward file
    engine = Engine(
        shell(f"cat {secret}; touch /usr/x; mount -o remount,rw,bind /usr; ls /tmp /.old"),
        shell(f"ln -sf {secret} /logs/verifier/reward.txt"),
        "done",
    )
    (sample,) = play(python, engine, [task], tmp_path)
    said = engine.prompts[1]
    assert f"{secret}: No such file" in said and "Read-only file system" in said
    assert "mount: " in said and not Path("/usr/x").exists()
    assert sample.status == SampleStatus.ABORTED, "its reward was not read through the link"
    assert secret.read_text() == "1"


def test_a_task_that_needs_an_image_is_lost_with_the_reason(python: Path, tmp_path: Path) -> None:
    task = made_task(python, tmp_path)
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("\nRUN apt-get install -y tmux\n")
    (sample,) = play(python, Engine("x"), [task], tmp_path)
    assert sample.status == SampleStatus.ABORTED
    assert "RUN apt-get install -y tmux: no image is built here" in sample.metadata["failure"]
