"""What a run needs around it is one sentence where it is missing, and no traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from arguments import surroundings
from arguments.run_config import RunConfig
from slime_like.errors import RunError
from slime_like.rewards import confinement
from slime_like.trainer.python_api import train
from tests.paths import ROOT

HERE = "slime_like cannot run here:"


def started(*words: str, prefix: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """A run without any flag. Returns status and standard error."""
    done = subprocess.run(
        [*prefix, sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr


def test_a_machine_as_it_should_be_lacks_nothing() -> None:
    assert surroundings.missing_surroundings() == []
    status, text = started("train.py")
    assert status == 2 and HERE not in text and "--hf-checkpoint" in text


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (("-O", "train.py"), {}, "python -O (PYTHONOPTIMIZE) leaves out assertions"),
        (
            ("train.py",),
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "set PYTHONUTF8=1",
        ),
    ],
)
def test_an_interpreter_that_reads_otherwise(
    words: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    status, text = started(*words, **environment)
    assert status == 2 and text.count(HERE) == 1 and message in text
    assert "Traceback" not in text and "codec" not in text


def test_too_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = started("train.py", prefix=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh"))
    assert status == 2 and "this user may open 64 files, at least 256" in text
    limits = [(64, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert surroundings.missing_surroundings() == [] and limits[-1] == (256, 4096)


@pytest.mark.skipif("namespaces" in confinement.missing(), reason="needs namespaces")
@pytest.mark.parametrize(
    ("around", "message"),
    [
        ((), "the loopback interface is down"),
        (("mount -t tmpfs none /proc",), "/proc is not mounted"),
    ],
)
def test_a_machine_without_loopback_or_proc(around: tuple[str, ...], message: str) -> None:
    kind = "--mount" if around else "--net"
    line = "; ".join((*around, 'exec "$@"'))
    prefix = ("unshare", "--user", "--map-root-user", kind, "sh", "-c", line, "sh")
    status, text = started("train.py", prefix=prefix)
    if text.startswith("unshare:"):
        pytest.skip(text)
    assert status == 2 and message in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-m", "slime_like.cli", "convert", "hf-to-megatron", "--hf-checkpoint", "m", "--save", "s"), 1),
        (("-m", "slime_like.cli", "convert", "megatron-to-hf", "--load", "m", "--hf-checkpoint", "m", "--output", "s"), 1),
        (("-m", "slime_like.tinker", "--hf-checkpoint", "m"), 2),
    ],
)  # fmt: skip
def test_other_programs_say_it_too(words: tuple[str, ...], expected: int) -> None:
    status, text = started("-O", *words)
    assert status == expected and HERE in text and "Traceback" not in text, text


def test_a_run_from_python_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "missing_surroundings", lambda: ["something"])
    with pytest.raises(RunError, match="cannot run here:\n  - something"):
        train(cast(RunConfig, None))


def test_help_needs_nothing_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "train.py", "--version"], cwd=ROOT, capture_output=True, timeout=200
    )
    assert done.returncode == 0


def test_files_in_the_working_folder_replace_no_library(tmp_path: Path) -> None:
    """With python -m, which puts that folder first."""
    for name in ("logging", "json", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the working folder')\n")
    words = ["--standalone", "--nproc-per-node", "1", str(ROOT / "train.py"), "--nothing"]
    done = subprocess.run(
        [sys.executable, "-m", "slime_like.torchrun", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "--nothing" in done.stderr and "taken from" not in done.stderr, done.stderr


@pytest.mark.parametrize("settings", ['rm_type="exact_match"', 'custom_rm_path="reward.py:score"'])
def test_nor_do_they_in_reward_workers(tmp_path: Path, settings: str) -> None:
    """Which python -c starts. A reward of a user is found in that folder nevertheless."""
    for name in ("logging", "json", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the working folder')\n")
    (tmp_path / "reward.py").write_text("import json\ndef score(args, sample): return 1.0\n")
    program = (
        "import torch; from slime_like.rewards.grader import Grader; "
        "from slime_like.types import Sample; mask = torch.ones(1, dtype=torch.bool); "
        f"grader = Grader({settings}, rm_num_workers=1); "
        "sample = Sample(group_id=0, sample_id=0, tokens=torch.tensor([1, 2]), response_length=1, "
        "loss_mask=mask, text='p', response='1', label='1'); "
        "print(grader.grade([sample])[0].reward); grader.close()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "1.0\n", done.stdout + done.stderr
