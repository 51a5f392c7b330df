"""Wrong command lines end at once, before any process group or model, with everything that is
wrong, printed once."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from arguments.parse import parse_args
from slime_like.config import ConfigError
from tests.paths import ROOT
from tests.unit.command_lines import complete

LIMIT_S = 10.0
# Several mistakes, or files that are missing; single ones are in tests/unit/arguments. What is added
# to a right command line, processes, flags that must be named; {folder} is the test's folder.
WRONG: list[tuple[str, int, tuple[str, ...]]] = [
    ("--critic-lr 1e-5 --lambd 0.9", 1, ("--critic-lr", "--lambd")),
    (
        "--advantage-estimator ppo --critic-load {folder}/none --critic-num-nodes 2",
        1,
        ("--critic-load", "--critic-num-nodes"),
    ),
    (
        "--advantage-estimator ppo --critic-pipeline-model-parallel-size 4",
        2,
        ("--critic-pipeline-model-parallel-size",),
    ),
    (
        "--colocate --rollout-num-gpus 2",
        1,
        ("--rollout-num-gpus",),
    ),
    (
        "--loss-type sft_loss --entropy-coef 0.1 --eval-interval 1",
        1,
        ("--entropy-coef", "--eval-interval"),
    ),
    (
        "--sglang-mem-fraction-static 0.7 --colocate",
        1,
        ("--sglang-mem-fraction-static", "--colocate"),
    ),
    ("--num-experts 8", 1, ("--num-experts",)),
    (
        "--moe-router-topk 2 --expert-model-parallel-size 2",
        2,
        ("--moe-router-topk", "--expert-model-parallel-size"),
    ),
    ("--hf-checkpoint {folder}/none", 1, ("--hf-checkpoint",)),
    ("--num-layers 3", 1, ("--num-layers",)),
    ("--fp16 --initial-loss-scale 1024", 1, ("--fp16", "--initial-loss-scale")),
    ("--config {folder}/none.yaml", 1, ("--config",)),
    (
        "--lr x --bogus --colocate --kl-loss-coef 1 --num-layers 9",
        1,
        ("--lr", "--bogus", "--colocate", "--kl-loss-coef", "--num-layers"),
    ),
]
THREE_MISTAKES = ("--polcy-loss-type", "sapo", "--lr", "fast", "--kl-loss-coef", "0.1")


def words_of(text: str, folder: Path) -> list[str]:
    return [word.replace("{folder}", str(folder)) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "world_size", "flags"), WRONG, ids=[case[0][:40] for case in WRONG]
)
def test_a_wrong_command_line(
    tmp_path: Path, text: str, world_size: int, flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(complete(tmp_path, *words_of(text, tmp_path)), world_size)
    assert tuple(sorted({p.flag for p in caught.value.problems})) == tuple(sorted(flags)), str(
        caught.value
    )


def run(command: list[str], limit_s: float) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished process, and the processor seconds of it and its children: what it takes
    whatever else the machine does."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    before = processor_seconds()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )  # fmt: skip
    return done, processor_seconds() - before


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    "extra",
    [THREE_MISTAKES, ("--lr",), ("--colocate", "--num-layers", "3")],
    ids=["typos", "no value", "not yet"],
)
def test_train_py(tmp_path: Path, extra: tuple[str, ...]) -> None:
    done, seconds = run([sys.executable, "train.py", *complete(tmp_path, *extra)], limit_s=250)
    assert done.returncode == 2, done.stderr
    assert "in the configuration:" in done.stderr and "Traceback" not in done.stderr
    assert re.fullmatch(r"start +[\d.]+ s: reading the command line, .*\n", done.stdout)
    for flag in (word for word in extra if word.startswith("--")):
        assert done.stderr.count(f"  - {flag}") == 1
    assert seconds < LIMIT_S


@pytest.mark.extended
def test_torchrun_prints_once(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ranks_and_launcher = 3
    done, seconds = run([*torchrun, "train.py", *complete(tmp_path, *THREE_MISTAKES)], limit_s=280)
    assert done.returncode != 0
    assert done.stderr.count("3 problems in the configuration") == 1, done.stderr
    assert done.stderr.count("did you mean --policy-loss-type?") == 1
    assert seconds < ranks_and_launcher * LIMIT_S


def test_help_of_the_program() -> None:
    done, _ = run([sys.executable, "train.py", "--help", "sapo"], limit_s=250)
    assert done.returncode == 0 and "--sapo-tau-pos" in done.stdout and done.stderr == ""
