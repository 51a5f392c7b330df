"""Run a function on several gloo processes and bring back what each returned: for the parity matrix
and for tests/dist.

    results = run_ranks("tests.dist.convert_worker:check_layouts", 4, tmp_path, {"model": "..."},
    timeout_s=120)

The function is called as `function(rank, world_size, arguments)` with the default process group
made, and returns something that JSON can hold. megatron-core takes seconds to import, so one
process imports it for all calls, and forks a launcher for each, which imports the function's module
and forks the ranks. These end with the call: when a rank fails the others are killed, and so are
all at the time limit.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil

REPOSITORY = Path(__file__).parents[2]


WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class _Preloaded:
    """A process that has imported `modules` and forks a launcher for each call. It ends when its
    standard input is closed, at the latest with this process."""

    def __init__(
        self,
        *modules: str,
        environment: Mapping[str, str] = WITHOUT_GPU,
        python: str = sys.executable,
    ) -> None:
        self._modules = modules
        self._environment = environment
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, argv: list[str], output: Path, timeout_s: float) -> int | None:
        """Run `main(argv)` in a separate session; returns its exit status, None if it was killed at
        the time limit.

        Args:
            output: File for its output.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [self._python, "-m", "benchmarks.parity.ranks", *self._modules],
                cwd=REPOSITORY,
                env={"OMP_NUM_THREADS": "1", **os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # so that select sees everything that readline has not consumed
                start_new_session=True,
            )
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None and answers is not None
        requests.write(json.dumps({"argv": argv, "output": str(output)}).encode() + b"\n")
        launcher = int(answers.readline())
        in_time = bool(select.select([answers], [], [], timeout_s)[0])
        _end_group(launcher)
        status = int(answers.readline())
        return status if in_time else None


PRELOADED = (
    "benchmarks.parity.steps",
    "slime_like.trainer.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
)
# by interpreter and environment
_preloaded: dict[tuple[str, tuple[tuple[str, str], ...]], _Preloaded] = {}


def _preloaded_in(environment: Mapping[str, str], python: str) -> _Preloaded:
    key = python, tuple(sorted(environment.items()))
    if key not in _preloaded:
        _preloaded[key] = _Preloaded(*PRELOADED, environment=environment, python=python)
    return _preloaded[key]


def run_ranks(
    target: str,
    world_size: int,
    folder: Path,
    arguments: dict[str, Any],
    timeout_s: float,
    *,
    show: bool = False,
    preloaded: bool = True,
    environment: Mapping[str, str] = WITHOUT_GPU,
    python: str = sys.executable,
) -> list[Any]:
    """Results of ranks 0 to world_size - 1. Raises AssertionError with the tracebacks of failing
    ranks.

    Args:
        show: Show the output of the ranks immediately.
        preloaded: False for a module that must be imported before megatron-core.
        environment: Variables of the ranks. If they see CUDA devices, each takes that of its rank.
        python: Their interpreter, of an environment with another release of megatron-core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    argv = [target, str(world_size), str(folder), json.dumps(arguments), str(timeout_s)]
    printed = folder / "output.txt"
    output = Path("/dev/stderr") if show else printed
    launcher = (
        _preloaded_in(environment, python)
        if preloaded
        else _Preloaded(environment=environment, python=python)
    )
    status = launcher.launch(argv, output, timeout_s)
    errors = "\n".join(
        f"{path.stem}: {path.read_text()}" for path in sorted(folder.glob("error-*.txt"))
    )
    if status is None:
        errors += f"\nno result within {timeout_s} s"
    elif not errors and not show:
        errors = printed.read_text()
    assert status == 0, f"{target} on {world_size} processes failed\n{errors}"
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world_size)]


def _end_group(leader: int, patience_s: float = 10.0) -> None:
    """Kill the remaining processes of a group and wait until they are gone, since a killed process
    first has to free its memory."""
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

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if cuda := torch.cuda.is_available():
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        module, _, name = target.partition(":")
        result = getattr(importlib.import_module(module), name)(rank, world_size, arguments)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()  # no rank exits while another still communicates with it
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _launch(argv: list[str]) -> int:
    """Fork the ranks and wait for them."""
    target, world_size, folder, arguments, timeout_s = argv
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
            return 1  # the ranks are killed with the group
        time.sleep(0.05)
    return max(abs(process.exitcode or 0) for process in ranks)


def _in_session(request: dict[str, Any]) -> NoReturn:
    """The forked launcher."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 1
    try:
        status = _launch(request["argv"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def warm_transformers() -> None:
    """Compile transformers' weight renamings of all models, a thousand regular expressions, which
    otherwise takes every process most of a second."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")


def freeze() -> None:
    """Exclude imported objects from garbage collection: in every forked process a full collection
    would visit, and thereby copy, a million objects, which takes half a second."""
    gc.collect()
    gc.freeze()


def main() -> None:
    """Fork a launcher for each line of standard input; prints its process id, and its exit status
    when it has ended."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    if "transformers" in sys.modules:
        warm_transformers()
    freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        launcher = os.fork()
        if launcher == 0:
            _in_session(json.loads(line))
        print(launcher, file=answers, flush=True)
        _, status = os.waitpid(launcher, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
