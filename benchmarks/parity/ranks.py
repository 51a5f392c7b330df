"""Run a function on several gloo processes and bring back what each returned: for the parity matrix
and for tests/dist.

    results = run_ranks("tests.dist.convert_worker:check_layouts", 4, tmp_path, {"model": "..."},
    timeout_s=120)

The function is called as `function(rank, world_size, arguments)` with the default process group
made, and returns something that JSON can hold. Its module is imported once, in a process that then
forks the ranks: megatron-core takes seconds to import. Every process ends with the call: when a
rank fails the others are killed, and so are all at the time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]


def run_ranks(
    target: str,
    world_size: int,
    folder: Path,
    arguments: dict[str, Any],
    timeout_s: float,
    *,
    show: bool = False,
) -> list[Any]:
    """The results of ranks 0 to world_size - 1. Raises AssertionError with the failing ranks'
    tracebacks. show: what the ranks print is shown as it comes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.parity.ranks",
        target,
        str(world_size),
        str(folder),
        json.dumps(arguments),
        str(timeout_s),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | (
        {"PYTHONWARNINGS": "ignore"} if show else {}
    )
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=None if show else subprocess.PIPE, stderr=None if show else subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            output = f"no result within {timeout_s} s"
        finally:
            _end_group(process.pid)
    errors = "\n".join(
        f"{path.stem}: {path.read_text()}" for path in sorted(folder.glob("error-*.txt"))
    )
    assert process.returncode == 0, f"{target} on {world_size} processes failed\n{errors or output}"
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world_size)]


def _end_group(leader: int, patience_s: float = 10.0) -> None:
    """Kill what is left of a process group, and wait until it is gone: a killed process gives back
    its memory first."""
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
        while time.monotonic() < deadline and any(_runs(pid) for pid in _members(leader)):
            time.sleep(0.02)


def _members(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _rank_main(
    target: str,
    rank: int,
    world_size: int,
    folder: Path,
    arguments: dict[str, Any],
    timeout_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        module, _, name = target.partition(":")
        result = getattr(importlib.import_module(module), name)(rank, world_size, arguments)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()  # nobody leaves while another is still talking to it
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def main() -> int:
    target, world_size, folder, arguments, timeout_s = sys.argv[1:]
    importlib.import_module(target.partition(":")[0])
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=_rank_main,
            args=(
                target,
                rank,
                int(world_size),
                Path(folder),
                json.loads(arguments),
                float(timeout_s),
            ),
            daemon=True,
        )
        for rank in range(int(world_size))
    ]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (None, 0) for process in ranks):
            time.sleep(2.0)  # let the others report what they saw
            return 1  # daemons: killed on exit
        time.sleep(0.05)
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
