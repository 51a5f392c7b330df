"""Real vLLM servers and small models for the tests of this folder, which `make test-vllm` runs. They
are started once, and take minutes to start: a test leaves them as it found them, but for the
weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slime_like.engines.vllm.factory import VllmProgram
from slime_like.servers.launches import Slot
from slime_like.servers.processes import Launch, ServerProcess, free_ports
from tests.e2e.programs import ROOT, TrainServer
from tests.own_environment import demo, mark_tests_beside
from tests.vllm.models import save_model

__all__ = ("demo",)  # a fixture

PYTHON = str(Path(os.environ.get("VLLM_ENV") or ROOT / ".venv-vllm") / "bin" / "python")
START_S = 600  # a loaded machine with two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_beside(__file__, items, pytest.mark.vllm)


@pytest.fixture(scope="session")
def wide_demo(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a model that vLLM can serve on a CPU."""
    folder = tmp_path_factory.mktemp("wide_demo")
    (folder / "train.jsonl").symlink_to(demo / "train.jsonl")
    save_model(folder / "model", demo / "model")
    return folder


@pytest.fixture(scope="session")
def expert_demo(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert_demo")
    (folder / "train.jsonl").symlink_to(demo / "train.jsonl")
    save_model(folder / "model", demo / "model", experts=True)
    return folder


@contextlib.contextmanager
def servers_of(
    variable: str, model: Path, logs: Path, count: int, *, lora_rank: int = 0
) -> Iterator[list[str]]:
    """Addresses, host:port.

    Args:
        variable: Of the environment, which may name some that run.
        lora_rank: Of adapters that they take.
    """
    if os.environ.get(variable):
        yield os.environ[variable].split()
        return
    program = VllmProgram(PYTHON, str(model), "float32", cuda=False, lora_rank=lora_rank)
    slots = [Slot("127.0.0.1", port, gpus=1, first_gpu=0) for port in free_ports(count)]
    processes = [
        ServerProcess(Launch(program.command(s), logs / f"{s.port}.log", program.environment(s)))
        for s in slots
    ]
    try:
        for slot, process in zip(slots, processes, strict=True):
            wait_for(f"http://127.0.0.1:{slot.port}/health", process)
        yield [f"127.0.0.1:{slot.port}" for slot in slots]
    finally:
        for process in processes:
            process.end()


def wait_for(url: str, process: ServerProcess) -> None:
    """Until it answers."""
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        assert process.exit_status is None and time.monotonic() < deadline, process.log_tail(3000)
        time.sleep(0.5)


@pytest.fixture(scope="session")
def servers(wide_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two: those of $VLLM_SERVERS ("host:port host:port"), or two that are started."""
    logs = tmp_path_factory.mktemp("servers")
    with servers_of("VLLM_SERVERS", wide_demo / "model", logs, 2) as found:
        yield found


@pytest.fixture(scope="session")
def expert_server(
    expert_demo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    logs = tmp_path_factory.mktemp("expert_server")
    with servers_of("VLLM_EXPERT_SERVER", expert_demo / "model", logs, 1) as found:
        yield found


@pytest.fixture(scope="session")
def programs() -> Iterator[TrainServer]:
    with TrainServer() as server:
        yield server
