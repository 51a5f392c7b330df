"""Processes of the servers that this run starts: command lines, ports and shutdown."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"
SUPERVISOR = Path(__file__).with_name("process_supervisor.py")
END_S = 6.0  # for a supervisor to end its server
LOWEST_PORT = 10000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# SGLang's defaults on a machine without a GPU; the user's --sglang flags override them.
CPU_SETTINGS: Mapping[str, object] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "max_total_tokens": 20000,  # KV cache size; SGLang's default is a share of all memory
    "max_running_requests": 64,
}


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct free ports. They are below the system's ephemeral port range, because a server binds
    its port only half a minute after its start, and an outgoing connection could take an ephemeral
    one until then. Raises OSError if there are too few."""
    candidates = range(LOWEST_PORT, _first_outgoing_port())
    ports: list[int] = []
    for port in random.SystemRandom().sample(candidates, k=len(candidates)):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind((host, port))
            ports.append(port)
    if len(ports) < count:
        raise OSError(
            f"{host} has {len(ports)} free ports from {candidates.start} to {candidates.stop - 1}, "
            f"{count} are needed"
        )
    return ports


def _first_outgoing_port() -> int:
    try:
        first = int(OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        first = 32768
    # if nearly all ports are ephemeral, no choice is better
    return first if first > LOWEST_PORT + 1000 else 65536


def command_line_of(settings: Mapping[str, object]) -> list[str]:
    """{"tp_size": 2, "sleep_on_idle": True} -> --tp-size 2 --sleep-on-idle. None and False are
    omitted."""
    arguments: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            arguments += map(str, value)
        elif value is not True:
            arguments.append(str(value))
    return arguments


@dataclass(frozen=True, slots=True)
class Launch:
    """Command to start (and restart) one server."""

    command: tuple[str, ...]
    log: Path  # file that its output is appended to
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables


class EngineProcess(ABC):
    """A server started by this run."""

    sender: int  # the rank on its node that can share memory with it

    @property
    @abstractmethod
    def exit_status(self) -> int | None:
        """The exit status; None while it runs."""

    @abstractmethod
    def log_tail(self, characters: int = 600) -> str:
        """The last `characters` of its output."""

    @abstractmethod
    def end(self) -> None:
        """Kill it with all descendants; returns when they are gone."""

    @abstractmethod
    def restart(self) -> EngineProcess:
        """Restart it after it has ended."""


class ServerProcess(EngineProcess):
    """A server on this host, under a supervisor."""

    sender = 0

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with open(launch.log, "ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-S", "-E", str(SUPERVISOR), str(os.getpid()), *launch.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment() | dict(launch.environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the parent of the server."""
        return self._supervisor.pid

    @property
    def exit_status(self) -> int | None:
        return self._supervisor.poll()

    def log_tail(self, characters: int = 600) -> str:
        try:
            text = self.launch.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return text[-characters:].strip()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor.pid, signal.SIGTERM)
        try:
            self._supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def restart(self) -> ServerProcess:
        return ServerProcess(self.launch)


class SpanningProcess(EngineProcess):
    """A server with ranks on several nodes. parts: by node; requests go to the first."""

    def __init__(self, parts: Sequence[EngineProcess]) -> None:
        self.sender = parts[0].sender
        self._parts = tuple(parts)

    @property
    def exit_status(self) -> int | None:
        return next((s for part in self._parts if (s := part.exit_status) is not None), None)

    def log_tail(self, characters: int = 600) -> str:
        part_characters = characters // len(self._parts)
        return "\n".join(filter(None, (part.log_tail(part_characters) for part in self._parts)))

    def end(self) -> None:
        for part in self._parts:
            part.end()

    def restart(self) -> SpanningProcess:
        self.end()
        return SpanningProcess([part.restart() for part in self._parts])


def clean_environment() -> dict[str, str]:
    """Environment of a server: without torchrun's and the trainer's own variables, because a server
    creates its own process groups. Raises the keep-alive timeout, 5 s by default and so shorter
    than the router's: the router counts requests lost on a closing connection against the server,
    and sends it nothing for a minute after 10 of them."""
    hidden = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONPATH",
        "ROLE_RANK",
    )
    kept = {
        k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("TORCHELASTIC_")
    }
    return {"SGLANG_TIMEOUT_KEEP_ALIVE": "600"} | kept


def server_command(python: str, settings: Mapping[str, object]) -> tuple[str, ...]:
    return (python, "-m", "sglang.launch_server", *command_line_of(settings))


def router_command(python: str, settings: Mapping[str, object]) -> tuple[str, ...]:
    return (python, "-m", "sglang_router.launch_router", *command_line_of(settings))


def server_settings(
    *,
    model: str,
    port: int,
    host: str,
    gpus: int,
    base_gpu: int,
    dtype: str,
    cuda: bool,
    memory_saver: bool,
    overrides: Mapping[str, object],
) -> dict[str, object]:
    """Arguments of one server. overrides: the user's --sglang flags, which override ours."""
    settings: dict[str, object] = {
        "model_path": model,
        "host": host,
        "port": port,
        "tp_size": gpus,
        "dtype": dtype,
        "trust_remote_code": False,
    }
    settings |= (
        {"base_gpu_id": base_gpu, "enable_memory_saver": memory_saver}
        if cuda
        else dict(CPU_SETTINGS)
    )
    return settings | dict(overrides)
