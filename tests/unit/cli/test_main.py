"""slime-like: every command starts, quickly, and `new` writes projects that train as they are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arguments.parse import parse_args
from slime_like.cli.__main__ import COMMANDS, Command, dispatch
from slime_like.cli.convert import DIRECTIONS
from slime_like.cli.new import (
    DEFAULT,
    SHARED,
    STARTERS,
    TEMPLATES,
    next_steps,
    write_project,
)
from slime_like.cli.new import parser as new_parser
from slime_like.metrics.logger import read_metrics
from slime_like.report.read import read_run
from slime_like.report.rollouts import read_samples
from tests.paths import ROOT
from tests.unit.command_lines import write_files

RUN = [sys.executable, "-m", "slime_like.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LISTED = """
import sys
from slime_like.cli.__main__ import main
for words in {lines}:
    sys.argv = ["slime-like", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
heavy = {{"torch", "transformers", "megatron.core", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder or ROOT,
        env=ENVIRONMENT,
    )


def test_a_command_finds_modules_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_there.py").write_text("def main() -> int:\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    assert dispatch("x", {"y": Command("a_module_there", "")}, ["y"]) == 7


def test_a_project_for_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Qwen/Qwen3-0: no such folder"):
        write_project(tmp_path / "new", "Qwen/Qwen3-0")
    assert not (tmp_path / "new").exists()


def test_the_console_script_is_this_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["slime-like"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_help_of_every_command_imports_nothing_heavy() -> None:
    lines = [[], ["convert"], *([name] for name in COMMANDS), *(["convert", d] for d in DIRECTIONS)]
    code = LISTED.format(lines=[[*line, "--help"] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert all(f"  {name}" in done.stdout for name in (*COMMANDS, *DIRECTIONS))


@pytest.mark.parametrize(
    "command", [*COMMANDS.values(), *DIRECTIONS.values()], ids=lambda c: c.module
)
def test_every_command_is_there(command: Command) -> None:
    assert callable(importlib.import_module(command.module).main)


def test_wrong_command_lines() -> None:
    done = run("trian")
    assert done.returncode == 2 and "did you mean train?" in done.stderr
    done = run("preflight", "--tensor-model-parallel-size", "3")
    assert done.returncode == 2 and "--hf-checkpoint" in done.stderr


@pytest.mark.parametrize("command", ["eval-sets", "inspect"])
def test_the_end_of_the_reader_is_silent(command: str, tmp_path: Path) -> None:
    """`slime-like inspect ... | head`, here of a reader that has ended before the first line."""
    words = [command, *([str(tmp_path)] if command == "inspect" else [])]
    (tmp_path / "iter_0000001").mkdir()
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*RUN, *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def shell_completes(line: str, folder: Path) -> list[str]:
    answer = folder / "answer"
    environment = {
        **ENVIRONMENT,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(RUN, env=environment, timeout=120, capture_output=True, cwd=ROOT)
    return [word.strip() for word in answer.read_text().split("\n")]


def test_shell_completion(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert shell_completes("slime-like tr", tmp_path) == ["train", "translate"]
    assert shell_completes("slime-like convert meg", tmp_path) == ["megatron-to-hf"]
    assert shell_completes("slime-like train --policy-loss-type s", tmp_path) == ["sapo", "sft"]
    assert shell_completes("slime-like new --hf", tmp_path) == ["--hf-checkpoint"]


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("starter", STARTERS)
def test_a_project_around_a_model_of_ones_own(
    starter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    model = str(tmp_path / "hf")
    folder = tmp_path / "my task"
    write_project(folder, model, starter)
    monkeypatch.chdir(folder)
    (learned,) = [name for name in ("train.jsonl", "pairs.jsonl") if Path(name).exists()]
    trained = {row["prompt"] for row in json_rows(Path(learned))}
    held_out = json_rows(Path("heldout.jsonl"))
    assert held_out and not {row["prompt"] for row in held_out} & trained
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--line-length=100",
            "--select=E,F,I,UP",
            ".",
        ],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
    first, *_ = STARTERS[starter].runs
    assert parse_args(["--config", first], 1).model.hf_checkpoint == model
    if first != "run.yaml":
        Path("sft").symlink_to(tmp_path)  # as if the first run had been there
    assert parse_args(["--config", "run.yaml"], 1).rollout.num_rollout
    with pytest.raises(ValueError, match="has files already"):
        write_project(folder, model, starter)


def places(prompts: list[str]) -> set[tuple[int, str]]:
    """(place from the end, character) of all prompts."""
    return {(place, char) for text in prompts for place, char in enumerate(reversed(text))}


@pytest.mark.parametrize("starter", ["tool", "agent", "sft-then-rl", "lora"])
def test_what_is_asked_for_has_been_shown(starter: str, tmp_path: Path) -> None:
    """A fine-tuned model hardly ever writes what no demonstration has, so no reward teaches it. The
    price 0, and 5 as the second digit of a sum, were in none."""
    write_files(tmp_path)
    folder = tmp_path / "task"
    write_project(folder, str(tmp_path / "hf"), starter)
    demos = json_rows(folder / "demos.jsonl")
    shown = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in demos]
    for name in ("train", "heldout"):
        asked = [row["prompt"] for row in json_rows(folder / f"{name}.jsonl")]
        assert places(asked) <= places(shown), name
    if starter == "agent":
        prices = Counter(row["messages"][-1]["content"] for row in demos)
        assert prices == dict.fromkeys("0123456789", 4), "agent.py says any of them"
    if starter == "tool":
        assert {row["answer"].split(".")[1] for row in demos} == {str(n) for n in range(19)}


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "\n  python -m pip install openai\n" in next_steps(tmp_path, "agent")
    assert "pip install" not in next_steps(tmp_path, "tool")


def test_starters_are_listed_and_have_folders() -> None:
    done = run("new", "--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*STARTERS]
    assert {path.name for path in TEMPLATES.iterdir()} == {*STARTERS, SHARED.name}
    assert run("new").returncode == 2
    assert "did you mean lora?" in run("new", "x", "--starter", "lorra").stderr


@pytest.mark.extended
@pytest.mark.parametrize("starter", sorted({*STARTERS} - {DEFAULT}))
def test_a_starter_trains(starter: str, tmp_path: Path) -> None:
    """The printed commands, with fewer rollouts."""
    folder = tmp_path / "task"
    done = run("new", str(folder), "--starter", starter)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  slime-like train")]
    for command in line.split(" && "):
        words = command.split()[1:]
        done = run(*words, "--num-rollout", "2", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(folder / "outputs/metrics.jsonl")
    assert [row["step"] for row in metrics if "eval/heldout/mean" in row] == [0, 2]


@pytest.mark.extended
def test_a_project_trains_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    assert run("new", str(folder)).returncode == 0
    done = run("train", "--config", "run.yaml", "--num-rollout", "20", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(folder / "outputs/metrics.jsonl")
    assert [row["step"] for row in metrics if "eval/heldout/mean" in row] == [0, 20]
    rewards = [row["rollout/reward_mean"] for row in metrics if row["step"]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert (folder / "outputs/rollouts/20.json").is_file()
    assert run("report", "outputs", folder=folder).returncode == 0
    found = read_samples([read_run(folder / "outputs")], 20_000)
    assert len(found.details) == 20 * 512 and not found.problems
    fields = {"tokens", "advantage", "log_prob", "diff", "entropy", "versions"}
    assert all(fields <= details.keys() for details in found.details)


def test_a_misspelt_command_or_starter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a command the help is printed; a wrong one gets the nearest name."""
    assert dispatch("slime-like", COMMANDS, []) == 2
    assert "train a policy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        dispatch("slime-like", COMMANDS, ["trian"])
    assert "error: trian: no such command; did you mean train?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        new_parser().parse_args([str(tmp_path / "x"), "--starter", "agnet"])
    assert "no starter 'agnet'; did you mean agent?; there are grpo" in capsys.readouterr().err
