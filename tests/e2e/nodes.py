"""Agents of torchrun on this host that stand for nodes, of one rank each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.e2e.programs import ENVIRONMENT, ROOT, clean_environment

CONF = "is_host={is_host},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def start_node(
    node: int, port: int, program: Path, argv: list[str], log: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Of one or two, with restarts. Node 0 has the store where they meet. log: is appended to."""
    command = [
        sys.executable, "-m", "slime_like.torchrun", "--nnodes", "1:2", "--max-restarts", "3", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", CONF.format(is_host=int(node == 0)),
        "--rdzv-id", "run", "--local-addr", "127.0.0.1", str(program), *argv,
    ]  # fmt: skip
    of_all = {**clean_environment(), **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=of_all | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )  # fmt: skip


def end_nodes(agents: Iterable[subprocess.Popen[bytes]]) -> None:
    """With all that they started."""
    for agent in agents:
        if agent.poll() is None:
            for process in psutil.Process(agent.pid).children(recursive=True):
                process.kill()
            agent.kill()
        agent.wait()
