"""The recipes of scripts/examples and the command lines of the documents: each parses, and the two
say the same."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.parse import SERVER, parse_args
from arguments.run_config import RunConfig
from slime_like.advantages import advantage_estimators
from slime_like.cli.__main__ import COMMANDS
from slime_like.cli.convert import DIRECTIONS
from slime_like.engines.registry import rollout_engines
from slime_like.losses import LossInputs, policy_losses
from slime_like.losses.custom import custom_loss
from slime_like.registry import Registry
from slime_like.rewards.registry import rewards
from slime_like.weight_sync.transports.base import weight_transports
from slime_like.weights.families.base import model_families
from tests.paths import ROOT
from tests.unit.command_lines import SEEING, write_files
from tests.unit.scripts.test_launch_scripts import recorded, recorder

RECIPES = sorted(
    path.stem for path in (ROOT / "scripts/examples").glob("*.sh") if path.stem != "common"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/en").rglob("*.md"))]
INDEX = ROOT / "docs/en/algorithms/index.md"
FIRST_RUNS = ROOT / "docs/en/first_runs.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:python|torchrun --nproc-per-node (\d)) train\.py (.+)$", re.MULTILINE)
_SERVER = re.compile(
    r"^(?:(?:python|torchrun --nproc-per-node (\d)) -m slime_like\.tinker|slime-like serve) (.+)$",
    re.MULTILINE,
)
_SCRIPT = re.compile(
    r"(?:python|\.venv-cookbook/bin/python) ((?:scripts|examples)/[\w/]+\.py)\b([^`\n#]*)"
)

_CLI = re.compile(r"^slime-like ([^`\n#]+)", re.MULTILINE)


def call(recipe: str, folder: Path, *flags: str, **variables: str) -> list[str]:
    """What a recipe hands to train.py."""
    command = ["bash", str(ROOT / f"scripts/examples/{recipe}.sh"), *flags]
    subprocess.run(command, env=recorder(folder) | variables, check=True, timeout=60)
    argv, where = recorded(folder)
    assert argv[0] == "train.py" and Path(where) == ROOT
    return argv[1:]


def demo_files(folder: Path, demo: str = "outputs/demo-sapo-tp2") -> None:
    """What the demo leaves, as far as a command line is checked against it, the reward, and other
    files that the documents name."""
    files = write_files(folder, max_position_embeddings=4096)
    (folder / "rollouts/0").mkdir(parents=True)
    for name in ("MODEL", "small", "large"):
        (folder / name).symlink_to(files["hf"])
    (folder / "VISION_MODEL").mkdir()
    (folder / "VISION_MODEL/config.json").write_text(
        json.dumps({**SEEING, "max_position_embeddings": 4096})
    )
    (folder / "train.parquet").touch()
    (folder / "data/gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        (folder / f"data/gsm8k/{name}.jsonl").write_text(
            '{"question": "1 + 1?", "answer": "#### 2"}\n'
        )
    model = folder / demo / "sft/hf"
    model.mkdir(parents=True)
    (model / "config.json").write_bytes((Path(files["hf"]) / "config.json").read_bytes())
    row = json.dumps({"messages": [{"role": "user", "content": "abc"}], "answer": "cba"})
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / demo / name).write_text(row + "\n")
    animal = {"question": "Spell this word backward (example: sun -> nus): cat", "answer": "tac"}
    (folder / "animals.jsonl").write_text(
        json.dumps(animal) + "\n"
    )  # make_my_data.py of FIRST_RUNS
    pair = {"prompt": "spell cat backward", "chosen": "tac", "rejected": "cat"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    answer = {"prompt": "spell cat backward", "completion": "tac", "label": True}
    (folder / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "scripts").mkdir()
    (folder / "scripts/demo_reward.py").write_bytes((ROOT / "scripts/demo_reward.py").read_bytes())


def warm_start_files(work: Path) -> None:
    """What scripts/warm_start.py leaves."""
    demo_files(work, "data")
    (work / "data/sft").rename(work / "sft")
    (work / "sft/done").touch()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_parses_with_the_demos_model(recipe: str, tmp_path: Path) -> None:
    work = tmp_path / "warm_start"
    work.mkdir()
    warm_start_files(work)
    config = parse_args(call(recipe, tmp_path, "--num-rollout", "30", WORK=str(work), MODEL=""), 1)
    assert config.rollout.num_rollout == 30, "flags of the caller come last"
    assert not config.warnings


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_parses_with_a_model_of_the_users(recipe: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, max_position_embeddings=40960)
    Path(files["prompts"]).write_text('{"question": "1+1=", "answer": "#### 2"}\n')
    config = parse_args(
        call(
            recipe,
            tmp_path,
            MODEL=files["hf"],
            TRAIN=files["prompts"],
            TEST=files["prompts"],
            OUTPUT=str(tmp_path / "out"),
        ),
        1,
    )
    assert config.megatron.transformer.bf16 and config.reward.rm_type == "gsm8k"
    assert all(words.startswith("--load ") for words in config.warnings), config.warnings


def test_the_first_call_makes_the_warm_start(tmp_path: Path) -> None:
    environment = recorder(tmp_path) | {"WORK": str(tmp_path / "new"), "MODEL": ""}
    python = Path(environment["PYTHON"])
    calls = tmp_path / "calls"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {calls}\n')
    subprocess.run(
        ["bash", str(ROOT / "scripts/examples/grpo.sh")], env=environment, check=True, timeout=60
    )
    first, second = calls.read_text().splitlines()
    assert first == f"scripts/warm_start.py --output-dir {tmp_path / 'new'}" and second.startswith(
        "train.py "
    )


def commands(page: Path, program: re.Pattern[str] = _COMMAND) -> Iterator[tuple[int, list[str]]]:
    """(processes, words after the program) of every command line in a page's code."""
    for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            for processes, words in program.findall(block.replace("\\\n", " ")):
                yield int(processes or 1), shlex.split(words, comments=True)


def run_yaml(page: Path) -> str:
    """The file run.yaml as a page shows it, else as the first page of its folder does, else
    FIRST_RUNS."""
    for path in (page, *page.parent.glob("index.md"), FIRST_RUNS):
        for language, block in _BLOCK.findall(path.read_text(encoding="utf-8")):
            if language == "yaml":
                return block
    raise AssertionError("no run.yaml")


def write_named_files(page: Path, folder: Path) -> None:
    """The Python code of a page whose first line is the name of a file."""
    for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        name = re.match(r"# (\w+\.py)\n", block)
        if language == "python" and name is not None:
            (folder / name[1]).write_text(block)


def parsed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    demo_files(folder)
    (folder / "run.yaml").write_text(run_yaml(page))
    for path in (page, FIRST_RUNS):
        write_named_files(path, folder)
    monkeypatch.chdir(folder)
    return [
        parse_args(words, processes) for processes, words in commands(page) if "--help" not in words
    ]


@pytest.fixture
def own_registrations() -> Iterator[None]:
    """What --import-modules adds is gone after the test."""
    tables: tuple[Registry[Any], ...] = (
        *(policy_losses, advantage_estimators, rewards),
        *(model_families, rollout_engines, weight_transports),
    )
    before = [set(table.names()) for table in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        for name in set(table.names()) - names:
            table.remove(name)


@pytest.mark.usefixtures("own_registrations")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_of_the_documents_parse(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in parsed(page, tmp_path, monkeypatch):
        assert all(words.startswith("--load ") for words in config.warnings), config.warnings


def test_command_lines_of_the_server_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one that starts SGLang, which is not installed here."""
    demo_files(tmp_path)
    (tmp_path / "outputs/demo").mkdir()
    (tmp_path / "outputs/demo/model").symlink_to(tmp_path / "hf")
    (tmp_path / "outputs/images").mkdir()
    (tmp_path / "outputs/images/model").symlink_to(tmp_path / "VISION_MODEL")
    monkeypatch.chdir(tmp_path)
    lines = [line for page in PAGES for line in commands(page, _SERVER) if "sglang" not in line[1]]
    assert len(lines) >= 3
    for processes, words in lines:
        assert not parse_args(words, processes, SERVER).warnings


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_have_the_flags_that_the_documents_give_them(page: Path) -> None:
    for script, words in _SCRIPT.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        text = (ROOT / script).read_text(encoding="utf-8")
        if script.startswith("examples/tinker/") and "from common import" in text:
            text += (ROOT / "examples/tinker/common.py").read_text(encoding="utf-8")
        for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", words):
            assert re.search(rf'"--{flag}"|\b{flag.replace("-", "_")}\b', text), (
                f"{script} --{flag}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_the_documents_exist(page: Path) -> None:
    """`slime-like train` is in the other tests, as train.py."""
    for line in _CLI.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        words = shlex.split(line)
        command = COMMANDS[words.pop(0)]
        if command.module == "slime_like.cli.convert":
            command = DIRECTIONS[words.pop(0)]
        if hasattr(module := importlib.import_module(command.module), "parser"):
            module.parser().parse_args(words)


def test_the_loss_of_the_guide_is_one(tmp_path: Path) -> None:
    write_named_files(ROOT / "docs/en/algorithms/policy_losses.md", tmp_path)
    loss = custom_loss(f"{tmp_path / 'my_loss.py'}:loss")
    log_probs = torch.tensor([0.5, -0.5, 1.0]).requires_grad_()
    zero = torch.zeros(3)
    ones = torch.ones(3, dtype=torch.bool)
    inputs = LossInputs(
        log_probs,
        ones,
        torch.ones(3),
        torch.zeros(3, dtype=torch.long),
        1,
        advantages=zero + 1,
        old_log_probs=zero,
    )
    loss.fn(inputs, SimpleNamespace(eps_clip=0.2)).token_losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [
        0.0,
        pytest.approx(-math.exp(-0.5)),
        0.0,
    ]


def test_the_guide_and_the_recipes_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every recipe has a command line in the guide, with the same settings of the algorithm."""
    (tmp_path / "guide").mkdir()
    in_guide = [
        (config.algorithm, config.policy_loss, config.off_policy)
        for config in parsed(INDEX, tmp_path / "guide", monkeypatch)
    ]
    work = tmp_path / "warm_start"
    work.mkdir()
    warm_start_files(work)
    text = INDEX.read_text(encoding="utf-8")
    for recipe in RECIPES:
        config = parse_args(call(recipe, tmp_path, WORK=str(work), MODEL=""), 1)
        assert (config.algorithm, config.policy_loss, config.off_policy) in in_guide, recipe
        assert f"scripts/examples/{recipe}.sh)" in text, recipe
