"""Command lines of other frameworks in our own flags: they mean the same, and say it in our words."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from arguments.flags import normalise
from arguments.parse import parse_args, translate
from arguments.translate.names import ALIASES, IGNORED, NEGATED_ALIASES, NO_EFFECT, PRESETS
from scripts.generate_slime_table import REFUSED
from slime_like.cli import translate as command
from slime_like.config import ConfigError
from tests.unit.arguments.slime_scripts import command_line, modules_of, slime_scripts
from tests.unit.arguments.test_from_python import settings_of
from tests.unit.command_lines import complete

ARGUMENTS = Path(__file__).resolve().parents[3] / "arguments"
SCRIPTS = slime_scripts()
FOREIGN = {*ALIASES, *NEGATED_ALIASES, *PRESETS, *NO_EFFECT, *IGNORED}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_a_script_of_slime_in_our_flags_is_the_same_run(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    with modules_of(script, tmp_path):
        theirs = [*command_line(script, tmp_path), "--preflight"]
        ours, notes = translate(theirs)
        expected = parse_args(theirs, 1)
        found = parse_args(ours, 1)
    # megatron-core's configs hold functions, which equal only themselves
    without = dict.fromkeys(("warnings", "notes", "teacher", "critic_model"))
    assert settings_of(found) | without == settings_of(expected) | without
    assert set(notes) <= set(expected.warnings)
    assert FOREIGN.isdisjoint(map(normalise, ours)) and translate(ours) == (ours, [])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--trainer.algorithm.use-tis", "--tis-ratio-type token"),
        ("trainer.algorithm.eps_clip_low=0.1", "--eps-clip 0.1"),
        ("--grpo-norm-by-std false", "--disable-grpo-std-normalization"),
        ("--advantage-estimator gspo", "--advantage-estimator grpo --policy-loss-type gspo"),
        ("--use-kl-in-reward --kl-loss-coef 0.5", "--kl-coef 0.5"),
        ("--use-tis --tis-clip 3", "--tis-ratio-type token --token-tis-ratio-clip-high 3.0"),
        ("--offload", "--offload-train --offload-rollout"),
        ("--router-policy random", "--router-policy random"),
        ("--lora-dropout 0 --use-mcore-models --start-rollout-id 0", ""),
    ],
)
def test_words(theirs: str, ours: str) -> None:
    words, _ = translate(theirs.split())
    assert words == ours.split()


def test_the_run_file_and_user_defined_flags_are_included(tmp_path: Path) -> None:
    functions = tmp_path / "flags.py"
    functions.write_text("def add(parser):\n    parser.add_argument('--depth', type=int)\n")
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  algorithm:\n    use_tis: true\nlr: 0.25\n")
    flag = ["--custom-arguments-path", f"{functions}:add"]
    words, _ = translate(["--config", str(file), *flag, "--depth", "3", "--lr", "0.5"])
    assert words == ["--tis-ratio-type", "token", "--lr", "0.5", *flag, "--depth", "3"]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "lr=1e-3", "--use-entropy-loss", "--label-key", "a --b"])
    assert command.main() == 0
    output = capsys.readouterr()
    assert output.out == "--lr 0.001 \\\n--label-key 'a --b'\n"
    assert (
        output.err == "note: --use-entropy-loss has no effect here: controlled by --entropy-coef\n"
    )
    monkeypatch.setattr(sys, "argv", ["x", "--no-such-flag"])
    assert command.main() == 2
    assert "unknown flag" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        translate(complete(tmp_path, "--tis-clip", "3", "--token-tis-ratio-clip-high", "4"))


def test_parser_and_parse_know_no_other_framework() -> None:
    """They call the translation and import no table of names; only --help and hints have them."""
    tables = {
        "arguments.translate.names",
        "arguments.translate.slime",
        "arguments.translate.losses",
    }
    names = ("skyrl", "slime", "verl", "openrlhf", "trl")
    for module in ("parse.py", "parser.py", "draft.py", "from_python.py"):
        tree = ast.parse((ARGUMENTS / module).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert tables.isdisjoint(imported)
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        words = {word for text in texts if isinstance(text, str) for word in text.lower().split()}
        assert words.isdisjoint(names), module
