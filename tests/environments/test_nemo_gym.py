"""NeMo Gym's resources servers, with the rows that the package ships."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.import_utils import load_function
from slime_like.types import SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.e2e.programs import free_port
from tests.environments.conftest import python_of, running
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import Engine, episodes

AGENT = ROOT / "examples" / "agents" / "nemo_gym_agent.py"
SERVER = ROOT / "examples" / "agents" / "nemo_gym_server.py"


def shipped(python: Path, name: str) -> Path:
    """The example rows of a resources server."""
    words = "import resources_servers as r; print(list(r.__path__)[0])"
    done = subprocess.run([str(python), "-c", words], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / name / "data" / "example.jsonl"


def rows(file: Path, url: str, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(AGENT), "rows", str(file), "--server", url, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_tools_and_a_verifier(tmp_path: Path) -> None:
    """example_multi_step: a call of each tool; the right list has reward 1, another one 0; and a model
    that calls the verifier is told that it is no tool."""
    python = python_of("nemo_gym")
    family = FAMILIES["qwen3"]
    url = f"http://127.0.0.1:{free_port()}"
    kind = "resources_servers.example_multi_step.app:ExampleMultiStepResourcesServer"
    command = [str(python), str(SERVER), kind, "--port", url.rpartition(":")[2]]
    with running(command, f"{url}/health", tmp_path, tmp_path / "log"):
        (row, *_) = rows(shipped(python, "example_multi_step"), url, "--max-steps", "4")
        found = row["metadata"]["nemo_gym"]["row"]
        right = {"synonym_values": found["expected_synonym_values"]}
        play = load_function(f"{AGENT}:play", "--agent-function-path")

        async def of_the_row(task: Any) -> Any:
            task.metadata.update(row["metadata"])
            return await play(task)

        for values, reward in ((right, 1.0), ({"synonym_values": [1]}, 0.0)):
            engine = Engine(
                call_text(family, [("get_synonym_value", {"synonym": "Outperform"})]),
                call_text(family, [("verify", {"reward": 1})]),
                call_text(family, [("extract_synonym_values", values)]),
                "done",
            )
            (sample,) = episodes(of_the_row, engine, 1, timeout_s=200, max_body=2**20)
            assert sample.status == SampleStatus.COMPLETED, sample.metadata
            assert sample.reward == reward
            assert "1075" in engine.prompts[1] and "there is no tool" in engine.prompts[2]
            assert trained(sample) == [t for tokens in engine.written for t in tokens]


@pytest.mark.parametrize(("letter", "reward"), [("B", 1.0), ("C", 0.0)])
def test_a_single_answer(tmp_path: Path, letter: str, reward: float) -> None:
    """mcqa: a choice in a box, without tools."""
    python = python_of("nemo_gym")
    url = f"http://127.0.0.1:{free_port()}"
    kind = "resources_servers.mcqa.app:MCQAResourcesServer"
    command = [str(python), str(SERVER), kind, "--port", url.rpartition(":")[2]]
    with running(command, f"{url}/health", tmp_path, tmp_path / "log"):
        row = rows(shipped(python, "mcqa"), url)[0]
        play = load_function(f"{AGENT}:play", "--agent-function-path")

        async def of_the_row(task: Any) -> Any:
            task.metadata.update(row["metadata"])
            return await play(task)

        engine = Engine("\\boxed{" + letter + "}")
        (sample,) = episodes(of_the_row, engine, 1, timeout_s=200, max_body=2**20)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, reward), sample.metadata
