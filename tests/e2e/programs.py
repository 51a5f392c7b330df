"""Complete runs of train.py and of our other programs, for tests.

    with TrainServer() as server:
        done = server.train(["--lr", "1e-3", ...], ranks=2)

Importing torch, transformers and megatron-core takes every process seconds, so a server imports
them once and forks the ranks of every run. A rank calls `train.main()`, or another program's main,
with its own command line, environment and output files. As under torchrun, the other ranks are
ended when one fails. All processes end with the server. Runs that test the launching itself use
`torchrun` below.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import ROOT

GRACE_S = 10.0  # for the other ranks to end by themselves after one has failed
PRELOADED = (
    "slime_like.trainer.trainer",
    "matplotlib.figure",
    "torch.utils.tensorboard",
    "megatron.core.dist_checkpointing.strategies.torch",
    "transformers.models.qwen3.modeling_qwen3",
    "slime_like.conversion.verify",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
}


@dataclass(frozen=True)
class Done:
    """A finished run."""

    status: int  # 0, or that of the first rank that failed
    out: str  # of all ranks together
    err: str  # of all ranks together
    seconds: float

    def ok(self) -> Done:
        assert self.status == 0, (
            f"exit status {self.status}\n{self.out[-3000:]}\n{self.err[-6000:]}"
        )
        return self

    def error(self) -> str:
        """The one message of a run that failed for a reason that its user can remove."""
        assert self.status == 1, (
            f"exit status {self.status}\n{self.out[-3000:]}\n{self.err[-6000:]}"
        )
        assert "Traceback" not in self.err, self.err
        messages = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(messages) == 1, self.err
        return messages[0]


class TrainServer:
    """Forks runs from a process that has imported everything. environment: variables of the runs,
    instead of `ENVIRONMENT`."""

    def __init__(self, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self._environment = environment

    def __enter__(self) -> TrainServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.programs"],
            cwd=ROOT,
            env={**clean_environment(), **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def train(self, argv: Sequence[str], folder: Path, **settings: Any) -> Done:
        """Run train.py; settings: see `run`."""
        return self.run("train", argv, folder, **settings)

    def run(
        self,
        program: str,
        argv: Sequence[Any],
        folder: Path,
        *,
        ranks: int = 1,
        timeout_s: float = 120,
        hook: str = "",
    ) -> Done:
        """Run main() of the module `program`; its output is kept in `folder`. hook:
        "module:function word ...", called by each rank with its number and the words before it
        starts; see tests/e2e/faults.py."""
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(word) for word in argv]
        request = {
            "program": program,
            "argv": words,
            "folder": str(folder),
            "ranks": ranks,
            "port": free_port(),
            "timeout_s": timeout_s,
        }
        request["hook"] = hook
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        text = {
            name: "".join((folder / f"{name}-{rank}.txt").read_text() for rank in range(ranks))
            for name in ("out", "err")
        }
        return Done(answer["status"], text["out"], text["err"], answer["seconds"])


def torchrun(ranks: int) -> list[str]:
    """The start of a command line that runs train.py on several processes."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
        "train.py",
    ]


def torchrun_once(argv: Sequence[str], *, ranks: int, timeout_s: float) -> tuple[int, str]:
    """A run as a user starts it: (exit status, all output)."""
    done = subprocess.run(
        [*torchrun(ranks), *argv],
        cwd=ROOT,
        env={**clean_environment(), **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout


def clean_environment() -> dict[str, str]:
    """Without what another launcher may have set."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }


def make_demo(folder: Path, *flags: object) -> Path:
    """The demo's model, which is not trained, and its rows, in this folder."""
    command = [
        sys.executable,
        "scripts/make_demo.py",
        "--output-dir",
        str(folder),
        "--max-word-len",
        "4",
        *map(str, flags),
    ]
    environment = {**clean_environment(), **ENVIRONMENT, "PYTHONPATH": "."}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    return folder


_GIVEN: deque[int] = deque(maxlen=100)  # not twice in a row


def free_port() -> int:
    """Of a range that the system gives to no outgoing connection, and no other test process looks
    in: nobody takes it meanwhile."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    while True:
        port = 20000 + 1000 * worker + random.randrange(1000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.append(port)
                return port


def _rank_main(request: dict[str, Any], rank: int) -> int:
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(
            Path(request["folder"]) / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(file, descriptor)
    if request["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
    sys.argv = [f"{request['program']}.py", *request["argv"]]
    program = importlib.import_module(request["program"])

    if request["hook"]:
        target, *words = request["hook"].split()
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(rank, *words)
    try:
        return int(program.main())
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _run(request: dict[str, Any]) -> int:
    """Fork the ranks and wait; 124 when they are out of time."""
    pids = {}
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # a rank and what it starts are killed together
            status = _rank_main(request, rank)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        pids[pid] = rank
    deadline = time.monotonic() + request["timeout_s"]
    first = 0
    running = set(pids)
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not first:
                    first, deadline = code, min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return first or (124 if running else 0)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import megatron_patches
    from arguments.parse import parse_args
    from benchmarks.parity.ranks import freeze, warm_transformers
    from slime_like.config import ConfigError
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    for name in PRELOADED:
        importlib.import_module(name)
    warm_transformers()
    with contextlib.suppress(ConfigError):
        parse_args([], 1)  # makes the parser
    freeze()
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        status = _run(request)
        answers.write(json.dumps({"status": status, "seconds": time.monotonic() - start}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
