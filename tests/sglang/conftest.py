"""Two real SGLang servers and a small model for the tests of this folder, which `make test-sglang` runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slime_like.rollout.sglang.processes import CPU_SETTINGS, Launch, ServerProcess, free_ports, server_command
from tests.e2e.programs import ROOT, TrainServer

PYTHON = str(ROOT / "scripts" / "sglang_cpu" / "python")
START_S = 400  # a loaded machine with two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(str(item.fspath)).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, tokenizer and prompts."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "scripts/make_demo.py", "--output-dir", str(folder), "--max-word-len", "4"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": "."})
    return folder


def launch(model: Path, port: int, log: Path) -> ServerProcess:
    settings = {**CPU_SETTINGS, "model_path": str(model), "host": "127.0.0.1", "port": port, "dtype": "float32", "max_running_requests": 16}
    return ServerProcess(Launch(server_command(PYTHON, settings), log))


def wait_for(url: str, process: ServerProcess) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            assert process.exit_status is None and time.monotonic() < deadline, process.last_words(3000)
        time.sleep(0.5)


@pytest.fixture(scope="session")
def servers(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """host:port of two servers with a model of the demo's shape: those of $SGLANG_SERVERS, where that is set, or two that are started."""
    if os.environ.get("SGLANG_SERVERS"):
        yield os.environ["SGLANG_SERVERS"].split()
        return
    logs = tmp_path_factory.mktemp("servers")
    ports = free_ports(2)
    processes = [launch(demo / "model", port, logs / f"{port}.log") for port in ports]
    try:
        for port, process in zip(ports, processes, strict=True):
            wait_for(f"http://127.0.0.1:{port}", process)
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.end()


@pytest.fixture(scope="session")
def programs() -> Iterator[TrainServer]:
    with TrainServer() as server:
        yield server
