"""examples/tinker/ as a user starts them, against a server with the demo's model: each ends with a
reward, and it is higher than at the start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.api_server import ApiServer
from tests.e2e.programs import ENVIRONMENT, ROOT, clean_environment, make_demo

pytestmark = pytest.mark.slow
REWARD = re.compile(r"reward (\d\.\d+)")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where scripts/demo.sh puts things; the model is not warm-started."""
    folder = make_demo(tmp_path_factory.mktemp("demo"), "--num-heldout", 16)
    (folder / "sft").mkdir()
    (folder / "model").rename(folder / "sft" / "hf")
    return folder


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(demo / "sft" / "hf", tmp_path_factory.mktemp("server")) as running:
        yield running


def run(server: ApiServer, name: str, *flags: object) -> str:
    command = [
        sys.executable,
        f"examples/tinker/{name}.py",
        "--base-url",
        server.url,
        *map(str, flags),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**clean_environment(), **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "flags"),
    [("grpo", ()), ("ppo", ()), ("ppo", ("--rank", 32)), ("custom_loss", ())],
    ids=["grpo", "ppo", "ppo-lora", "custom_loss"],
)
def test_rewards_rise(server: ApiServer, name: str, flags: tuple[object, ...]) -> None:
    rewards = [
        float(found)
        for found in REWARD.findall(
            run(server, name, "--model", server.model, "--steps", 12, *flags)
        )
    ]
    assert len(rewards) == 13 and rewards[-1] > rewards[0] + 0.05, rewards


def test_supervised_fine_tuning(server: ApiServer) -> None:
    message = run(server, "sft", "--model", server.model)
    (reward,) = REWARD.findall(message)
    assert float(reward) > 0.8 and "saved tinker://" in message


def test_the_demo(server: ApiServer, demo: Path) -> None:
    """Two rollouts; train.py's curve next to its own."""
    (demo / "rl").mkdir()
    (demo / "rl" / "metrics.jsonl").write_text(
        '{"step": 0, "eval/heldout/mean": 0.25}\n{"step": 2, "eval/heldout/mean": 0.5}\n'
    )
    message = run(server, "demo", "--demo", demo, "--stop-after", 2, "--batch", 4)
    assert re.search(
        r"reward \d\.\d{3}, train.py 0.500 after 2 rollouts; both began at \d\.\d{3}, 0.250",
        message,
    ), message
