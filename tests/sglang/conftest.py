"""Two real SGLang servers, a router and a small model for the tests of this folder, which `make
test-sglang` runs. They are started once: a test leaves them as it found them, but for the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.sglang.factory import NO_FEATURE_CACHE
from slime_like.servers.processes import (
    CPU_SETTINGS,
    Launch,
    ServerProcess,
    free_ports,
    router_command,
    server_command,
)
from tests.e2e.helpers import Workspace, make_expert_model
from tests.e2e.programs import ROOT, TrainServer
from tests.own_environment import demo, mark_tests_beside
from tests.vision import picture

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


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers, and a router."""

    addresses: tuple[str, ...]  # host:port of each
    router: str  # host:port of one that knows none of them unless a run added them

    @property
    def urls(self) -> list[str]:
        return [f"http://{address}" for address in self.addresses]

    @property
    def flags(self) -> list[str]:
        """Of a run that uses them."""
        host, port = self.router.split(":")
        return [
            "--rollout-external-engine-addrs",
            *self.addresses,
            "--sglang-router-ip",
            host,
            "--sglang-router-port",
            port,
        ]

    @property
    def flags_without_router(self) -> list[str]:
        return ["--rollout-external-engine-addrs", *self.addresses, "--no-sglang-router"]


def server_launch(
    model: Path, port: int, log: Path, variables: Mapping[str, str] | None = None, **more: Any
) -> Launch:
    settings = {
        **CPU_SETTINGS,
        "model_path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max_running_requests": 16,
    }
    return Launch(server_command(PYTHON, settings | more), log, variables or {})


def router_launch(port: int, log: Path) -> Launch:
    (metrics,) = free_ports(1)
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics,
        "log_level": "warn",
    }
    return Launch(
        router_command(
            PYTHON, settings | {"retry_max_retries": 2, "health_check_interval_secs": 5}
        ),
        log,
    )


def wait_for(url: str, process: ServerProcess) -> None:
    """Until it answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert process.exit_status is None and time.monotonic() < deadline, process.log_tail(3000)
        time.sleep(0.5)


@pytest.fixture(scope="session")
def servers(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two with a model of the demo's shape: those of $SGLANG_SERVERS ("host:port host:port
    router's-host:port"), or two that are started."""
    with two_servers("SGLANG_SERVERS", demo / "model", tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="session")
def expert_servers(
    expert_demo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Two with experts, that report where tokens go: those of $SGLANG_EXPERT_SERVERS, or two that are
    started."""
    logs = tmp_path_factory.mktemp("expert_servers")
    with two_servers(
        "SGLANG_EXPERT_SERVERS", expert_demo / "model", logs, enable_return_routed_experts=True
    ) as found:
        yield found


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes pictures, in `model`, and rows with none, one or two, in `rows.jsonl`."""
    folder = tmp_path_factory.mktemp("seeing")
    make_tiny_model("Qwen3-VL", folder / "model", images=True)
    rows = []
    for number in range(16):
        names = []
        for own in range(number % 3):
            path = folder / f"{number}_{own}.png"
            path.write_bytes(picture(10 * number + own, 16 + 8 * own, 24))
            names.append(path.name)
        text = "<image>" * len(names) + f"what is {number}?"
        rows.append({"messages": text, "images": names, "answer": "red"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def seeing_servers(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two with this model, that keep no features of images: those of $SGLANG_SEEING_SERVERS, or two
    that are started."""
    logs = tmp_path_factory.mktemp("seeing_servers")
    with two_servers(
        "SGLANG_SEEING_SERVERS", seeing / "model", logs, variables=NO_FEATURE_CACHE
    ) as found:
        yield found


@contextlib.contextmanager
def two_servers(variable: str, model: Path, logs: Path, **more: Any) -> Iterator[Servers]:
    """With a router.

    Args:
        variable: Of the environment, which may name some that run.
        more: Of `server_launch`.
    """
    if os.environ.get(variable):
        first, second, router = os.environ[variable].split()
        yield Servers((first, second), router)
        return
    ports = free_ports(3)
    launches = [server_launch(model, port, logs / f"{port}.log", **more) for port in ports[:2]]
    processes = [
        ServerProcess(launch)
        for launch in (*launches, router_launch(ports[2], logs / "router.log"))
    ]
    try:
        for port, process, path in zip(
            ports, processes, ("/health", "/health", "/workers"), strict=True
        ):
            wait_for(f"http://127.0.0.1:{port}{path}", process)
        first, second, router = (f"127.0.0.1:{port}" for port in ports)
        yield Servers((first, second), router)
    finally:
        for process in processes:
            process.end()


@pytest.fixture(scope="session")
def programs() -> Iterator[TrainServer]:
    with TrainServer() as server:
        yield server


def give_own_weights(servers: Servers, model: Path, version: str = "own") -> None:
    """The servers have the weights of this folder again, whatever a run gave them."""
    for url in servers.urls:
        httpx.post(f"{url}/continue_generation", json={}, timeout=60).raise_for_status()
        body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
        httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=120).raise_for_status()


def running(url: str) -> int:
    """Requests that a server works on, or has in its queue."""
    loads = httpx.get(f"{url}/v1/loads", timeout=30).raise_for_status().json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def schedulers_below(pid: int) -> list[int]:
    """Processes that a process has started, itself or through others, and that hold a server's
    model."""
    return [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if "".join(child.cmdline()[:1]).startswith("sglang::schedul")
    ]


@contextlib.contextmanager
def slowed(servers: Servers, seconds: float) -> Iterator[None]:
    """Every step of every server takes that much longer."""

    def tell(value: float) -> None:
        for url in servers.urls:
            httpx.post(
                f"{url}/slow_down", json={"forward_sleep_time": value}, timeout=60
            ).raise_for_status()

    tell(seconds)
    try:
        yield
    finally:
        tell(0.0)
