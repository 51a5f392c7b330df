"""torchrun agents on this host that act as nodes with one rank each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.helpers import rows_of
from tests.e2e.programs import ENVIRONMENT, ROOT, clean_environment, free_port

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


@contextmanager
def two_nodes(
    folder: Path, argv: list[str], **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Of one rank each; the first has the store where they meet. They write their logs into the
    folder."""
    port, agents = free_port(), list[subprocess.Popen[bytes]]()
    try:
        for node in range(2):
            log = folder / f"node-{node}.log"
            agents.append(start_node(node, port, ROOT / "train.py", argv, log, **environment))
        yield agents
    finally:
        end_nodes(agents)


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("node-?.log")))


def rollouts(out: Path) -> int:
    return len(rows_of(out)) if (out / "metrics.jsonl").exists() else 0


def wait_until(holds: Callable[[], object], folder: Path, limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, logs(folder)[-6000:]
        time.sleep(0.1)


def goes_on(out: Path, folder: Path, limit_s: float = 240) -> None:
    """Two more rollouts are done."""
    before = rollouts(out)
    wait_until(lambda: rollouts(out) >= before + 2, folder, limit_s)


# what the launcher looks for, and what it starts, in place of SGLang
SITE = {
    "sglang/__init__.py": "",
    "sglang/srt/server_args.py": "class ServerArgs: ...\n",
    "sglang/launch_server.py": """
import argparse, time
from tests.fake_sglang import FakeServer
parser = argparse.ArgumentParser()
for name in ("--model-path", "--host"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
args, _ = parser.parse_known_args()
with FakeServer(args.model_path, args.port, args.host) as fake:
    print("listens", flush=True)
    released = 0
    while True:
        time.sleep(0.05)
        if fake.count("/release_memory_occupation") > released:
            released += 1
            print("released", flush=True)
""",
}


def python_with_servers(folder: Path) -> Path:
    """An interpreter that finds small servers with SGLang's interface in place of SGLang."""
    for file, source in SITE.items():
        path = folder / "site" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={folder / "site"}:{ROOT} exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script
