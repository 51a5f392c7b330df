"""OpenEnv's own server of the environment that `openenv init` creates, which echoes messages and
rewards their length."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from slime_like.agents.environment import player
from slime_like.environments.base import environment_maker
from slime_like.environments.openenv import OpenEnv
from slime_like.types import SampleStatus
from tests.e2e.programs import free_port
from tests.environments.conftest import python_of, running
from tests.unit.agents.test_server import Engine, episodes

ROW = {"prompt": "Say it.", "metadata": {}}


def test_an_environment_of_the_package(tmp_path: Path) -> None:
    """Text and reward of each step; the only place of the server is waited for; and a policy's turns
    become its actions."""
    python = python_of("openenv")
    openenv = str(python.parent / "openenv")
    subprocess.run(
        [openenv, "init", "parrot"], cwd=tmp_path, check=True, capture_output=True, timeout=300
    )
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(python), "-m", "uvicorn", "server.app:app", "--port", url.rpartition(":")[2]]
    with running(command, f"{url}/health", tmp_path / "parrot", tmp_path / "log"):
        make = environment_maker(f"openenv:{url}")
        first = make()
        assert isinstance(first, OpenEnv)
        assert first.reset(seed=1, row=ROW) == (
            'Say it.\n\n{"echoed_message": "Parrot environment ready!", "message_length": 0}'
        )
        assert first.step("I think. <answer>hello</answer>") == (
            '{"echoed_message": "hello", "message_length": 5}', 0.5, False,
        )  # fmt: skip
        full = environment_maker(f"openenv:{url}?wait_s=0.5")()
        with pytest.raises(RuntimeError, match=r"CAPACITY_REACHED"):
            full.reset(seed=1, row=ROW)
        second = environment_maker(f"openenv:{url}?observation=echoed_message")()
        assert isinstance(second, OpenEnv)
        closing = threading.Thread(target=lambda: (time.sleep(1), first.close()))
        closing.start()
        assert second.reset(seed=1, row=ROW) == "Say it.\n\nParrot environment ready!"
        closing.join()
        second.close()
        with pytest.raises(ValueError, match="an action has no field 'word'; it has message"):
            environment_maker(f"openenv:{url}?action=word")
        engine = Engine(*["abcd"] * 20)  # until the context is full, for it never ends
        (sample,) = episodes(player(make), engine, 1, timeout_s=100)
    assert sample.status == SampleStatus.COMPLETED, sample.metadata
    turns = sample.metadata["agent"]["answers"]
    assert turns > 2 and sample.reward == pytest.approx(0.4 * turns)
    assert '"echoed_message": "abcd"' in engine.prompts[2]
