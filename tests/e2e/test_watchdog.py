"""A rank that is stopped, killed, slow or stuck, in every phase: the run ends in bounded time with
the name of the rank, and can be taken up; or it continues."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.helpers import Workspace
from tests.e2e.programs import ENVIRONMENT, ROOT, Done, TrainServer, clean_environment, torchrun

FAULTS = "tests.e2e.faults"
LIMIT_S = 6  # a process that starts on a loaded machine gives no sign of life for seconds
HERE = f"host {socket.gethostname()}, process "
# phase -> which entry of it: after the first checkpoint. An evaluation, and the sync for it, come
# before training and before every save
PHASES = {"generate": 2, "log_probs": 2, "train": 2, "sync": 3, "save": 2, "eval": 3}


def flags(work: Workspace, out: Path, **changes: str | int | float) -> list[str]:
    settings: dict[str, str | int | float] = {
        "num_rollout": 3, "heartbeat_timeout_s": LIMIT_S, "save": out / "ck", "load": out / "ck", "save_interval": 1,
        "eval_prompt_data": f"words {work.prompts}@[:4]", "eval_interval": 1,
    }  # type: ignore[dict-item]  # fmt: skip
    return work.flags(out, **(settings | changes))


def fails(
    server: TrainServer, work: Workspace, out: Path, hook: str, **changes: str | int | float
) -> Done:
    done = server.train(
        flags(work, out, **changes), out / "log", ranks=2, hook=f"{FAULTS}:{hook}", timeout_s=250
    )
    assert done.status not in (0, 124), (
        f"the run continued, or did not end by itself\n{done.out}\n{done.err}"
    )
    family = psutil.Process(server.pid).children(recursive=True)
    assert not [p for p in family if p.status() != psutil.STATUS_ZOMBIE], "a process is left"
    return done


def goes_on(server: TrainServer, work: Workspace, out: Path) -> None:
    again = server.train(flags(work, out), out / "log-again", ranks=2, timeout_s=250).ok()
    assert "rollout 3/3" in again.out and "rollout 1/3" not in again.out


def check_stopped(done: Done, phase: str, rank: int) -> None:
    """The one that runs reports who is silent, and its own stacks."""
    named = (
        "no sign of life from" if rank == 1 else "no answer from the store"
    )  # without torchrun, rank 0 holds the store
    assert named in done.err, done.err
    assert re.search(
        rf"rank {rank} \({HERE}\d+\), last heard of in phase {phase} for ", done.err
    ), done.err
    assert f"rank {1 - rank} on host {socket.gethostname()} ends; it was in phase " in done.err
    assert (
        "Stacks of its threads:" in done.err
        and "most recent call first" in done.err
        and "trainer.py" in done.err
    )


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        pytest.param(
            p, r, marks=pytest.mark.extended if (p, r) == ("train", 1) else pytest.mark.slow
        )
        for p in PHASES
        for r in (0, 1)
    ],
)
def test_a_stopped_rank_ends_the_run(
    server: TrainServer, work: Workspace, tmp_path: Path, phase: str, rank: int
) -> None:
    done = fails(server, work, tmp_path, f"stop_in_phase {phase} {PHASES[phase]} {rank}")
    check_stopped(done, phase, rank)
    assert done.seconds < 200
    if rank == 1:
        goes_on(server, work, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_ends_the_run(
    server: TrainServer, work: Workspace, tmp_path: Path, phase: str
) -> None:
    done = fails(
        server, work, tmp_path, f"kill_in_phase {phase} {PHASES[phase]} 1", heartbeat_timeout_s=20
    )
    assert done.status == -signal.SIGKILL
    assert re.search(rf"error: no answer from rank 1 \({HERE}\d+\)", done.err), done.err
    goes_on(server, work, tmp_path)


@pytest.mark.extended
def test_rank_0_killed_without_torchrun(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The store is gone with it; each of the others says so."""
    done = fails(server, work, tmp_path, "kill_in_phase train 2 0", heartbeat_timeout_s=60)
    assert done.status == -signal.SIGKILL
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    assert re.search(
        rf"error: rank 1 on host {socket.gethostname()} has no answer from rank 0 \({HERE}\d+\), which holds the store of this run",
        lines[0],
    ), lines
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_run_that_is_suspended_as_a_whole_continues(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Longer than twice the limit; nobody is blamed when it continues.
    tests/unit/distributed/test_signed_store.py has the same in one process."""
    hook = f"{FAULTS}:suspend_all_in_phase train 2 {3 * LIMIT_S}"
    done = server.train(
        flags(work, tmp_path), tmp_path / "log", ranks=2, hook=hook, timeout_s=250
    ).ok()
    assert done.seconds > 3 * LIMIT_S and "rollout 3/3" in done.out
    assert "the process of rank 0 did not run for" in done.out and "error: " not in done.err


@pytest.mark.extended
def test_a_slow_rank_is_named_and_waited_for(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Twice as long as the limit for silence."""
    argv = flags(work, tmp_path, heartbeat_timeout_s=5, num_rollout=2)
    done = server.train(
        argv, tmp_path / "log", ranks=2, hook=f"{FAULTS}:sleep_in_phase train 10 1", timeout_s=250
    ).ok()
    reported = re.findall(
        rf"slow, not gone: the others wait for rank 1 \({HERE}\d+\), last heard of in phase train for .*",
        done.err,
    )
    assert len(reported) == 1, done.err
    assert "rollout 2/2" in done.out


@pytest.mark.slow
def test_a_stuck_rank_is_named_when_the_collectives_time_out(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Its process gives signs of life, so the limit for collectives decides (of megatron-core's
    groups, a minute at least); the message says where it is."""
    done = fails(
        server, work, tmp_path, "sleep_in_phase train 1000 1", distributed_timeout_minutes=0.2
    )
    found = re.search(
        rf"error: no answer from rank 1 \({HERE}\d+\), last heard of in phase train for .*, without a move for \d+ s",
        done.err,
    )
    assert found, done.err


@pytest.mark.slow
def test_a_stopped_rank_under_torchrun(work: Workspace, tmp_path: Path) -> None:
    """torchrun kills the process that is stopped, 30 seconds after it asked it to end; its port is
    free then."""
    log, command = tmp_path / "log.txt", torchrun(2)
    argv = flags(work, tmp_path, num_rollout=1000, save_interval=1000)
    with log.open("w") as file:
        job = subprocess.Popen(
            [*command, *argv],
            cwd=ROOT,
            env={**clean_environment(), **ENVIRONMENT},
            stdout=file,
            stderr=file,
        )
    family = psutil.Process(job.pid)
    try:
        deadline = time.monotonic() + 200
        while "rollout    2/1000" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        ranks = {
            int(p.environ()["RANK"]): p for p in family.children() if "train.py" in p.cmdline()
        }
        everyone = family.children(recursive=True)
        ranks[1].suspend()
        assert job.wait(timeout=120) == 1
    finally:
        for process in [family, *family.children(recursive=True)] if job.poll() is None else []:
            process.kill()
    text = log.read_text()
    assert re.search(
        rf"error: no sign of life from rank 1 \({HERE}{ranks[1].pid}\), last heard of in phase \w+",
        text,
    ), text
    assert f"rank 0 on host {socket.gethostname()} ends; it was in phase " in text
    assert not [p for p in everyone if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], (
        "a process is left"
    )
    port = int(
        next(word for word in command if word.startswith("--master-port=")).removeprefix(
            "--master-port="
        )
    )
    with socket.create_server(("127.0.0.1", port)):
        pass
