"""The launcher's argparse parser: public, complete, and extended by a user's module."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arguments import get_parser
from arguments.flag_registry import GROUPS, flag_table, normalise
from arguments.parse import parse_args
from arguments.parser import HelpRequested
from arguments.run_file import read_run_file
from arguments.values import FALSE, TRUE
from slime_like.compat.slime.samples import slime_args
from slime_like.config import CheckedSettings
from slime_like.losses import policy_losses
from tests.paths import ROOT
from tests.unit.command_lines import complete, problems_of

CUSTOM = """
def add_custom_arguments(parser):
    parser.add_argument("--my-weight", type=float, default=0.5, help="Weight of my term.")
    parser.add_argument("--my-switch", action="store_true")
    parser.add_argument("--my-kind", choices=("a", "b"), default="a")
    parser.add_argument("--my_words", nargs="+", default=[])
    return parser
"""


def test_every_flag_is_an_action_in_the_group_of_its_title() -> None:
    parser = get_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    titles = {g.title: {id(a) for a in g._group_actions} for g in parser._action_groups}
    for flag in flag_table().flags:
        if flag.rejection:
            continue
        for name in (*flag.on, *flag.off):
            action = actions[name]
            assert action.dest == flag.dest and id(action) in titles[flag.group]
            assert action.choices == flag.choices and action.default == flag.default


def test_both_programs_have_a_parser_of_the_callers_own() -> None:
    one, other = get_parser(), get_parser("server")
    one.add_argument("--mine")
    assert "--mine" not in get_parser()._option_string_actions
    assert one.format_help().startswith("usage: python train.py")
    assert other.format_help().startswith("usage: python -m slime_like.tinker")


def test_values_defaults_and_unknown_words_as_from_any_parser() -> None:
    words = ["--lr", "1e-3", "--sapo_tau_pos=2", "--theirs", "a", "--use-kl-loss"]
    values, rest = get_parser().parse_known_args(words)
    assert (values.lr, values.sapo_tau_pos, values.use_kl_loss) == (1e-3, 2.0, True)
    assert values.policy_loss_type == "ppo" and rest == ["--theirs", "a"]


def test_a_wrong_value_ends_a_plain_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        get_parser().parse_args(["--lr", "fast", "--num-rollout", "x"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "--lr" in printed and "--num-rollout" in printed


SWITCHES = sorted(
    {
        name
        for flag in flag_table().flags
        if flag.kind == "switch" and not flag.rejection
        for name in (*flag.on, *flag.off)
    }
    | {
        "--use-tis",
        "--calculate-per-token-loss",
        "--use-rotary-position-embeddings",
        "--use-tensorboard",
        "--use-kl-in-reward",
        "--grpo-norm-by-std",
    }
)


def test_every_switch_reads_its_value_by_one_rule() -> None:
    """A value has the meaning that it has, whichever way it is written, and nothing else switches
    on."""
    parser = get_parser()
    assert len(SWITCHES) > 100
    for name in SWITCHES:
        on, off = parser.read([name]), parser.read([f"{name}=false"])
        assert on.values and not on.problems and not off.problems, name
        assert on.values != off.values, name
        for word in TRUE:
            assert parser.read([name, word.upper()]).values == on.values, (name, word)
            assert parser.read([f"{name}={word}"]).values == on.values, (name, word)
        for word in FALSE:
            assert parser.read([name, word.upper()]).values == off.values, (name, word)
        for word in ("maybe", "5.0", "2", "", "flase"):
            for words in ([name, word], [f"{name}={word}"]):
                given = parser.read(words)
                assert [p.flag for p in given.problems] == [name] and not given.values, words


def test_no_flag_takes_a_number_that_float32_or_64_bits_cannot_hold(tmp_path: Path) -> None:
    """1e39 is infinite there, and a divisor of 1e-50 is 0."""
    parser, file = get_parser(), tmp_path / "run.yaml"
    numbers = [f for f in flag_table().flags if f.item in (int, float) and not f.rejection]
    assert len(numbers) > 200
    for flag in numbers:
        if flag.kind not in ("value", "list") or flag.choices:
            continue
        wrong = ("1e39", "1e-50", "-1e39") if flag.item is float else ("9" * 20,)
        for word in wrong:
            given = parser.read([f"{flag.name}={word}"])
            assert [p.flag for p in given.problems] == [flag.name] and not given.values, flag.name
            assert "must be" in given.problems[0].message
            file.write_text(f"{flag.dest}: {word}\n")
            (of_file,) = (
                parser.read(["--config", str(file)]).problems
                or read_run_file(str(file), parser).problems
            )
            assert normalise(of_file.flag) == normalise(flag.dest), flag.name


def test_every_group_of_settings_refuses_them_whoever_constructs_it() -> None:
    """But what a checkpoint's config.json says of the network, which is read there."""
    unchecked = {
        name for name, (_, kind) in GROUPS.items() if not issubclass(kind, CheckedSettings)
    }
    assert unchecked == {"gpt"}
    for name, loss in policy_losses.items():
        assert issubclass(loss.config_type, CheckedSettings), name


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--calculate-per-token-loss --loss-reduction sequence_mean", "--calculate-per-token-loss"),
        ("--loss-reduction sequence_mean --calculate-per-token-loss", "--loss-reduction"),
        ("--use-tis --tis-ratio-type sequence", "--use-tis"),
        ("--use-tis false --tis-ratio-type token", "--tis-ratio-type"),
        ("--eps-clip 0.2 --eps-clip-low 0.3", "--eps-clip"),
        ("--tis-clip 2 --token-tis-ratio-clip-high 3", "--tis-clip"),
        ("--normalize-advantages --advantage-batch-normalize false", "--normalize-advantages"),
        ("--grpo-norm-by-std true --disable-grpo-std-normalization", "--grpo-norm-by-std"),
    ],
)
def test_two_spellings_of_one_setting_do_not_disagree(words: str, named: str) -> None:
    (problem,) = get_parser().read(words.split()).problems
    assert named in problem.message and problem.flag in words


@pytest.mark.parametrize(
    "words",
    [
        "--calculate-per-token-loss --loss-reduction token_mean",
        "--eps-clip 0.2 --eps-clip-low 0.2",
        "--eps-clip 0.2 --eps-clip 0.3",
        "--use-tis false --tis-ratio-type sequence",
        "--use-tis --use-tis false",
        "--use-kl-loss --no-use-kl-loss",
    ],
)
def test_spellings_that_agree_and_repetitions_are_fine(words: str) -> None:
    assert not get_parser().read(words.split()).problems


def test_hydra_words_and_null() -> None:
    words = "trainer.algorithm.eps_clip_low=0.1 ++trainer.algorithm.use_tis=false eps_clip_c=null"
    given = get_parser().read(words.split())
    assert (
        not given.problems and given.values == {"eps_clip": 0.1} and given.unset == {"eps_clip_c"}
    )
    given = get_parser().read(["--rollout-stop", "lr=3", "nobody=3"])
    assert given.values == {"rollout_stop": ["lr=3", "nobody=3"]}


def test_the_command_line_takes_back_what_a_run_file_switched_on(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("use_tis: true\neps_clip_c: 3\n")
    argv = complete(tmp_path, "--config", str(file), "--num-steps-per-rollout", "2")
    assert (
        parse_args(argv, 1).off_policy.enabled and parse_args(argv, 1).policy_loss.eps_clip_c == 3
    )
    config = parse_args([*argv, "--use-tis", "false", "--eps-clip-c=null"], 1)
    assert not config.off_policy.enabled and config.policy_loss.eps_clip_c is None


# --- flags of the user's own ----------------------------------------------------------------------


def with_custom(folder: Path, *more: str, text: str = CUSTOM) -> list[str]:
    file = folder / f"mine_{abs(hash(text))}.py"
    file.write_text(text)
    return complete(folder, "--custom-arguments-path", f"{file}:add_custom_arguments", *more)


def test_flags_of_the_users_own_reach_the_users_functions(tmp_path: Path) -> None:
    args = slime_args(parse_args(with_custom(tmp_path), 1))
    assert (args.my_weight, args.my_switch, args.my_kind, args.my_words) == (0.5, False, "a", [])
    words = ("--my_weight=2", "--my-switch", "--my-words", "x", "y", "--my-kind", "b")
    args = slime_args(parse_args(with_custom(tmp_path, *words), 1))
    assert (args.my_weight, args.my_switch, args.my_kind) == (2.0, True, "b")
    assert args.my_words == ["x", "y"] and args.rollout_batch_size == 4


def test_flags_of_the_users_own_in_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("my_weight: 3\nmy-switch: true\nmy_words: [a, b]\nmy_kind: b\n")
    config = parse_args(with_custom(tmp_path, "--config", str(file), "--my-kind", "a"), 1)
    assert dict(config.custom) == {
        "my_weight": 3.0,
        "my_switch": True,
        "my_words": ["a", "b"],
        "my_kind": "a",
    }
    file.write_text("my_weight: heavy\n")
    argv = with_custom(tmp_path, "--config", str(file))
    assert [p.flag for p in problems_of(argv)] == ["--my-weight"]
    file.write_text(f"custom_arguments_path: {argv[-3]}\nmy_weight: 4\n")
    assert parse_args(complete(tmp_path, "--config", str(file)), 1).custom["my_weight"] == 4.0


def test_wrong_values_of_the_users_flags_come_with_all_others(tmp_path: Path) -> None:
    words = (
        "--my-weight",
        "heavy",
        "--my-kind",
        "c",
        "--my-wieght",
        "1",
        "--lr",
        "x",
        "--my-words",
    )
    found = problems_of(with_custom(tmp_path, *words, "--my-switch=maybe"))
    flags = ["--my-switch", "--my-weight", "--my-kind", "--my-wieght", "--lr", "--my-words"]
    assert sorted(p.flag for p in found) == sorted(flags)
    assert any("did you mean --my-weight" in p.message for p in found)


def test_help_shows_the_users_flags(tmp_path: Path) -> None:
    with pytest.raises(HelpRequested) as wanted:
        parse_args(with_custom(tmp_path, "--help", "custom"), 1)
    assert "--my-weight" in str(wanted.value) and "Weight of my term." in str(wanted.value)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("parser.add_argument('--lr')", "--lr"),
        ("parser.add_argument('--mine', dest='lr')", "--mine"),
        ("parser.add_argument('place')", "place"),
        ("parser.set_defaults(lr=1e-3)", "'lr'"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
    ],
)
def test_a_module_that_adds_what_cannot_be(tmp_path: Path, body: str, word: str) -> None:
    argv = with_custom(tmp_path, text=f"def add_custom_arguments(parser):\n    {body}\n")
    (problem,) = problems_of(argv)
    assert problem.flag == "--custom-arguments-path" and word in problem.message


def test_a_required_flag_of_the_users(tmp_path: Path) -> None:
    body = "parser.add_argument('--must', required=True)"
    text = f"def add_custom_arguments(parser):\n    {body}\n"
    assert [p.flag for p in problems_of(with_custom(tmp_path, text=text))] == ["--must"]
    assert parse_args(with_custom(tmp_path, "--must", "x", text=text), 1).custom == {"must": "x"}
    file = tmp_path / "run.yaml"
    file.write_text("must: y\n")
    argv = with_custom(tmp_path, "--config", str(file), text=text)
    assert parse_args(argv, 1).custom == {"must": "y"}


# --- as a shell sees it ---------------------------------------------------------------------------


def shell_completes(line: str, folder: Path) -> list[str]:
    """What argcomplete answers to a shell at the end of `line`."""
    answer = folder / "answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    words = [sys.executable, str(ROOT / "train.py")]
    subprocess.run(words, env=environment, check=False, timeout=120, capture_output=True, cwd=ROOT)
    return answer.read_text().split("\n")


def test_shell_completion(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert shell_completes("train.py --policy-loss-type s", tmp_path) == ["sapo", "sft"]
    found = shell_completes("train.py --lr 1e-6 --sapo-tau", tmp_path)
    assert sorted(word.strip() for word in found) == ["--sapo-tau-neg", "--sapo-tau-pos"]


def test_help_into_a_pipe_that_is_closed(tmp_path: Path) -> None:
    script = f"{sys.executable} {ROOT / 'train.py'} --help 2>{tmp_path / 'err'} | head -1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.stdout.startswith("usage:") and (tmp_path / "err").read_text() == ""
