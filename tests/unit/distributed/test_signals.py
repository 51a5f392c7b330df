"""Signals: one that comes twice within moments is one, a later one ends the process, and what is
left for the script that started a run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arguments.parse import parse_args
from arguments.schema import CheckpointConfig
from tests.paths import ROOT
from tests.unit.command_lines import HF_CONFIG, complete

CATCH = """
import os, signal, sys, time
from slime_like.distributed import signals
signals.REPEAT_S, signals.REPEAT_CTRL_C_S = 60.0, 60.0
stop = signals.StopConditions(every=None, minutes=None, announce=True)
stop.catch(*signals.SIGNALS)
number = signal.Signals[sys.argv[1]]
for repeat_s in sys.argv[2:]:
    signals.REPEAT_S = signals.REPEAT_CTRL_C_S = float(repeat_s)
    os.kill(os.getpid(), number)
request = stop.requested(1, lambda flags: flags)
print(request.reason, request.status)
"""
AT_ONCE = """
import os, signal, sys
from slime_like.distributed import signals
signals.end_at_once(int(sys.argv[1]), resumable=sys.argv[2] == "resumable")
os.kill(os.getpid(), signal.SIGTERM)
"""


def run(
    program: str, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "words"),
    [("SIGTERM", "SIGTERM 75"), ("SIGHUP", "SIGHUP 75"), ("SIGINT", "Ctrl-C 130")],
)
def test_a_signal_that_comes_again_at_once_is_the_same(name: str, words: str, times: int) -> None:
    """SLURM sends it to every process, and torchrun passes on what it got."""
    done = run(CATCH, name, *["60"] * times)
    assert (done.returncode, done.stdout) == (0, f"{words}\n"), done.stderr
    assert done.stderr.count("the run ends after this rollout") == 1


@pytest.mark.parametrize(
    ("module", "imported", "name", "ended"),
    [
        ("slime_like.torchrun", "torch", "SIGINT", (130, "interrupted\n")),
        ("slime_like.torchrun", "torch", "SIGHUP", (130, "interrupted\n")),
        ("slime_like.tinker", "megatron_patches", "SIGINT", (130, "interrupted\n")),
        ("train", "arguments", "SIGINT", (130, "interrupted\n")),
        ("train", "arguments", "SIGHUP", (129, "stopped by SIGHUP\n")),
    ],
)
def test_a_signal_in_an_import_is_one_sentence(
    tmp_path: Path, module: str, imported: str, name: str, ended: tuple[int, str]
) -> None:
    """Imports take seconds, and Python ends itself by SIGINT when an import was
    interrupted."""
    (tmp_path / f"{imported}.py").write_text(
        "import os, signal\n"
        "if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"os.kill(os.getpid(), signal.{name})\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    words = ["--hf-checkpoint", tmp_path, "--server-dir", tmp_path / "server"]
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == ended


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_later_signal_ends_the_process(name: str) -> None:
    """Later than 0 seconds, the limit for the second one here."""
    assert run(CATCH, name, "60", "0").returncode == -signal.Signals[name]


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_the_parent_ignores_stays_ignored(name: str) -> None:
    """nohup, and a shell's job in the background."""
    program = f"import signal; signal.signal(signal.{name}, signal.SIG_IGN)\n{CATCH}"
    done = run(program, name, "60")
    assert done.returncode == 1 and "'NoneType' object has no attribute 'reason'" in done.stderr


@pytest.mark.parametrize(
    ("rank", "kind", "status", "left"),
    [(0, "resumable", 75, "75\n"), (0, "lost", 143, "143\n"), (1, "lost", 143, None)],
)
def test_a_signal_before_the_first_rollout(
    tmp_path: Path, rank: int, kind: str, status: int, left: str | None
) -> None:
    file = tmp_path / "status"
    done = run(AT_ONCE, str(rank), kind, environment={"SLIME_LIKE_STATUS_FILE": str(file)})
    assert done.returncode == status
    assert (file.read_text() if file.exists() else None) == left
    assert done.stderr == ("stopped by SIGTERM\n" if rank == 0 else "")


LINES = """
import sys
from pathlib import Path
from slime_like.logs import log_into, set_up_logging
set_up_logging(0)
log_into(Path(sys.argv[1]))
for number in range(20_000):
    print("line", number, flush=number % 7 == 0)
print("the end", file=sys.stderr)
"""


def pipeline(tmp_path: Path, redirection: str, *, unbuffered: bool = False) -> tuple[int, str, str]:
    """(status, what the reader got, stderr) of the program above."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = f'set -o pipefail; "$0" -c "$1" "$2" {redirection}'
    words = [sys.executable, LINES, str(tmp_path)]
    done = subprocess.run(
        ["bash", "-c", command, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("redirection", ["| head -1", "> /dev/full", ">&-"])
def test_a_run_continues_without_the_reader_of_its_output(
    tmp_path: Path, redirection: str, unbuffered: bool
) -> None:
    """On stderr, which says so; no line after that is lost."""
    status, out, err = pipeline(tmp_path, redirection, unbuffered=unbuffered)
    numbers = [int(line.split()[1]) for line in err.splitlines() if line.startswith("line ")]
    assert numbers == list(range(numbers[0], 20_000))
    assert (status, out) == (0, "line 0\n" if "head" in redirection else "")
    assert err.endswith("line 19999\nthe end\n") or err.endswith("the end\nline 19999\n"), err[
        -200:
    ]
    if redirection != ">&-":
        assert err.count("warning: stdout is closed (") == 1
        assert "the run continues, and writes to stderr from here on" in err


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_run_continues_without_any_reader(tmp_path: Path, unbuffered: bool) -> None:
    status, out, _ = pipeline(tmp_path, "2>&1 | head -1", unbuffered=unbuffered)
    assert (status, out) == (0, "line 0\n")
    text = (tmp_path / "run.log").read_text()
    assert "the run continues, and writes to " in text and "line 19999\n" in text
    assert text.count("the end") == 1


def test_messages_by_rank_and_level() -> None:
    program = """
import logging, sys
from slime_like.logs import set_up_logging, warn_rank_0
set_up_logging(int(sys.argv[1]))
logger = logging.getLogger("slime_like.trainer.launch")
logger.debug("debug")
logger.info("progress %d", 3)
logger.warning("an odd \x1b[31mcolour\x1b[0m \\u202e and \x07")
warn_rank_0(logger, "all ranks found 100% of it")
warn_rank_0(logger, None)
logger.error("gone")
try:
    raise KeyError("why")
except KeyError:
    logger.exception("failed")
"""
    odd = r"an odd \x1b[31mcolour\x1b[0m \u202e and \x07"
    first = run(program, "0")
    assert first.stdout == (f"progress 3\nwarning: {odd}\nwarning: all ranks found 100% of it\n")
    reported, _, traced = first.stderr.partition("error: gone\n")
    assert reported == "" and traced.startswith("Traceback (most recent call last):\n")
    assert traced.endswith("KeyError: 'why'\nerror: failed\n")
    third = run(program, "3")
    assert third.stdout == ""
    assert third.stderr.startswith(f"warning: rank 3: {odd}\nerror: gone\nTraceback")


def test_what_continues_a_run_is_what_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like.trainer.launch import command_to_continue

    folder = CheckpointConfig(load="./runs/", save="runs")  # the same, by another name
    config: Any = SimpleNamespace(argv=["--lr", "1"], checkpoint=folder)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert command_to_continue(config, 1) == "python train.py --lr 1"
    monkeypatch.setattr(sys, "argv", ["slime-like train"])
    assert command_to_continue(config, 1) == "slime-like train --lr 1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    expected = "torchrun --nproc-per-node 2 --no-python slime-like train --lr 1"
    assert command_to_continue(config, 2) == expected


def test_what_continues_a_run_from_a_part_of_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is the whole of the newest one of this run, whatever the command line or its file had."""
    from slime_like.trainer.launch import command_to_continue

    monkeypatch.setattr(sys, "argv", ["train.py"])
    (tmp_path / "old" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(f"load: {tmp_path}/old\nno_load_rng: true\n")
    words = complete(
        tmp_path, "--config", str(tmp_path / "run.yaml"), "--finetune", "--no-load-optim", "--save",
        str(tmp_path / "new"),
    )  # fmt: skip
    first = parse_args(words, 1)
    assert first.checkpoint.finetune and first.checkpoint.no_load_rng
    with_step = replace(first, checkpoint=replace(first.checkpoint, ckpt_step=4))
    command = shlex.split(command_to_continue(with_step, 1))
    assert command[:2] == ["python", "train.py"]
    found = parse_args(command[2:], 1).checkpoint
    assert found.load == found.save == str(tmp_path / "new")
    assert (found.ckpt_step, found.finetune) == (None, False)
    assert not found.no_load_optim and not found.no_load_rng


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged or missing numbers; the run itself is done."""
    from slime_like.trainer.launch import write_report

    write_report(tmp_path, plot=True)
    (tmp_path / "metrics.jsonl").write_text("[]\n{}\n")
    write_report(tmp_path, plot=True)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "could not write plot and table of" in caplog.text and "metrics.jsonl:1" in caplog.text


@pytest.mark.parametrize(
    ("program", "status", "shown"),
    [
        ("sys.exit(2 if rank == 0 else time.sleep(600))", 2, ""),
        ("leave_status(75, rank); sys.exit(75)", 75, ""),
        (
            "os.kill(os.getpid(), 9 * (rank == 1)); time.sleep(600 * (rank == 0))",
            137,
            "error: rank 1 (process ",
        ),
    ],
)
def test_the_launcher_ends_as_its_ranks_do(
    tmp_path: Path, program: str, status: int, shown: str
) -> None:
    """torchrun has status 1 for all of them, and a traceback."""
    file = tmp_path / "ranks.py"
    imports = "import os, sys, time\nfrom slime_like.distributed.signals import leave_status\n"
    file.write_text(f"{imports}rank = int(os.environ['RANK'])\n{program}\n")
    command = [sys.executable, "-m", "slime_like.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and shown in done.stderr
