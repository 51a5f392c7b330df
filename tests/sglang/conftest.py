"""Two real SGLang servers and a small model for the tests of this folder, which `make test-sglang` runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime_like.rollout.sglang.processes import CPU_SETTINGS, Launch, ServerProcess, free_ports, server_command
from tests.e2e.helpers import Workspace, make_expert_model
from tests.e2e.programs import ROOT, TrainServer
from tests.own_environment import demo, mark_tests_beside

__all__ = ("demo",)  # a fixture

PYTHON = str(ROOT / "scripts" / "sglang_cpu" / "python")
START_S = 400  # a loaded machine with two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_beside(__file__, items, pytest.mark.sglang)


@pytest.fixture(scope="session")
def expert_demo(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a model that has experts."""
    folder = tmp_path_factory.mktemp("expert_demo")
    (folder / "train.jsonl").symlink_to(demo / "train.jsonl")
    make_expert_model(Workspace(demo / "model", folder / "model", folder / "train.jsonl", folder))
    return folder


def launch(model: Path, port: int, log: Path, **more: Any) -> ServerProcess:
    settings = {**CPU_SETTINGS, "model_path": str(model), "host": "127.0.0.1", "port": port, "dtype": "float32", "max_running_requests": 16}
    return ServerProcess(Launch(server_command(PYTHON, settings | more), log))


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
    with two_servers("SGLANG_SERVERS", demo / "model", tmp_path_factory.mktemp("servers")) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def expert_servers(expert_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two with experts, that tell where tokens go: those of $SGLANG_EXPERT_SERVERS, or two that are started."""
    logs = tmp_path_factory.mktemp("expert_servers")
    with two_servers("SGLANG_EXPERT_SERVERS", expert_demo / "model", logs, enable_return_routed_experts=True) as addresses:
        yield addresses


@contextlib.contextmanager
def two_servers(variable: str, model: Path, logs: Path, **more: Any) -> Iterator[list[str]]:
    """host:port of each. variable: of the environment, which may name some that run. more: settings of a server."""
    if os.environ.get(variable):
        yield os.environ[variable].split()
        return
    ports = free_ports(2)
    processes = [launch(model, port, logs / f"{port}.log", **more) for port in ports]
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


def give_own_weights(servers: list[str], model: Path) -> None:
    """The servers have the weights of this folder again, whatever a run gave them."""
    for server in servers:
        body = {"model_path": str(model), "weight_version": "own", "flush_cache": True}
        httpx.post(f"http://{server}/update_weights_from_disk", json=body, timeout=120).raise_for_status()
