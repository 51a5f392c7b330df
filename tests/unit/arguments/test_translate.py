"""Command lines of other frameworks in our own flags: they mean the same, and say it in our words."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.flags import normalise
from arguments.parse import parse_args, translate
from arguments.translate import hydra
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


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=train.parquet
    data.val_files=['a.parquet','b.parquet'] actor_rollout_ref.model.path=Qwen/Qwen3-0.6B
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.optim.lr=1e-6
    algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.use_kl_loss=True trainer.logger=['console','wandb'] trainer.test_freq=-1
    custom_reward_function.path=score.py custom_reward_function.name=mark"""
SKYRL = """uv run --isolated --extra vllm -m skyrl.train.entrypoints.main_base
    trainer.policy.model.path=Qwen/Qwen3-0.6B data.train_data=['train.parquet']
    trainer.algorithm.eps_clip_low=0.1 trainer.policy.megatron_config.tensor_model_parallel_size=2
    generator.sampling_params.max_generate_length=1024 trainer.logger=null"""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (VERL, "--advantage-estimator ppo --prompt-data train.parquet --eval-prompt-data val1 a.parquet "
               "val2 b.parquet --hf-checkpoint Qwen/Qwen3-0.6B --n-samples-per-prompt 5 --lr 1e-06 "
               "--disable-grpo-std-normalization --loss-reduction token_mean --use-kl-loss --tracker wandb "
               "--custom-rm-path score.py:mark"),
        (SKYRL, "--hf-checkpoint Qwen/Qwen3-0.6B --prompt-data train.parquet --eps-clip 0.1 "
                "--tensor-model-parallel-size 2 --rollout-max-response-len 1024"),
        ("python3 train.py --lr 0.5", "--lr 0.5"),
    ],
)  # fmt: skip
def test_whole_lines_of_verl_and_skyrl(theirs: str, ours: str) -> None:
    words, notes = translate(theirs.split())
    assert words == ours.split()
    assert not [note for note in notes if note.startswith(hydra.NOT_TRANSLATED)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("L=cispo low=10 high=0.2", "--cispo-eps-clip-low 10.0 --cispo-eps-clip-high 0.2"),
        ("high=0.2 low=10 L=cispo", "--cispo-eps-clip-high 0.2 --cispo-eps-clip-low 10.0"),
        ("L=cispo C=0.3", "--cispo-eps-clip-low 0.3 --cispo-eps-clip-high 0.3"),
        ("L=cispo C=0.3 high=4", "--cispo-eps-clip-low 0.3 --cispo-eps-clip-high 4.0"),
        ("low=0.1 C=0.3 high=0.4", "--eps-clip 0.1 --eps-clip-high 0.4"),
        ("C=0.3 low=0.1", "--eps-clip 0.1"),
        ("C=0.3 low=null", "--eps-clip 0.3"),
    ],
)
def test_the_clip_bounds_of_verl(theirs: str, ours: str) -> None:
    """In any order; cispo has its own."""
    actor = "actor_rollout_ref.actor."
    names = {"L": "policy_loss.loss_mode", "C": "clip_ratio"}
    names |= {side: f"clip_ratio_{side}" for side in ("low", "high")}
    pairs = (pair.split("=") for pair in theirs.split())
    words, notes = translate([f"{actor}{names[name]}={value}" for name, value in pairs])
    found = dict(zip(words[::2], words[1::2], strict=True))
    assert found.pop("--policy-loss-type", "ppo") == ("cispo" if "cispo" in theirs else "ppo")
    expected = ours.split()
    assert found == dict(zip(expected[::2], expected[1::2], strict=True))
    assert not [note for note in notes if note.startswith(hydra.NOT_TRANSLATED)]


def test_keys_without_a_counterpart_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = (
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.nnodes=2 data.train_files=[a,b] "
        "algorithm.kl_ctrl.kl_coef=0.1 data.train_batch_size=8 --label-key data.x=1"
    )
    monkeypatch.setattr(sys, "argv", ["x", *theirs.split()])
    assert command.main() == 1
    output = capsys.readouterr()
    assert output.out == "--rollout-batch-size 8 \\\n--label-key data.x=1\n"
    assert output.err.splitlines() == [
        "note: not translated: actor_rollout_ref.actor.ppo_mini_batch_size=64; see "
        "--global-batch-size in samples, or --num-steps-per-rollout",
        "note: not translated: trainer.nnodes=2",
        "note: not translated: data.train_files=[a,b]: --prompt-data takes one value",
        "note: not translated: algorithm.kl_ctrl.kl_coef=0.1: verl uses it with use_kl_in_reward only",
    ]


# columns of their data, and switches that need another setting
ELSEWHERE = ("reward_model.ground_truth", "algorithm.use_kl_in_reward", "ppo_epochs", "resume_mode")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_and_the_code_have_the_same_keys(language: str) -> None:
    """Each key of the tables of SkyRL and verl is translated, or known to mean more than a name;
    each key that is translated is in a row with its flag."""
    page = (ARGUMENTS.parent / f"docs/{language}/coming_from_others.md").read_text("utf-8")
    tables = page.partition("\n## SkyRL")[2].partition("\n## TRL")[0]
    rows = [line.split(" | ", 1) for line in tables.splitlines() if line.startswith("| ")]
    known = {*hydra.KEYS, *hydra.OTHER_MEANING, hydra.REWARD_FILE, hydra.REWARD_NAME}
    rows_alone = ("trainer.algorithm.", "custom_reward_function", *hydra.OTHER_MEANING)
    found = []
    for theirs, ours in rows:
        named = re.findall("`([^`]+)`", theirs)
        if "." not in theirs or named[0].startswith(rows_alone):
            continue  # by SkyRL's prefix, or described by the row as a whole
        for name in named:
            keys = [key for key in known if key == name or key.endswith(f".{name}")]
            assert keys or name in ELSEWHERE, f"{name} is in the page and not in the code"
            flags = [hydra.KEYS[key].flag for key in keys if key in hydra.KEYS]
            assert not flags or any(flag in ours for flag in flags), f"{name}: {flags}, {ours}"
            found += keys
    unnamed = {key for key in hydra.KEYS if key not in found and "megatron" not in key}
    assert not unnamed, "translated, and not in the page"


def test_every_translated_key_is_a_flag_and_hinted_by_train(tmp_path: Path) -> None:
    table = flag_table()
    for name, key in hydra.KEYS.items():
        assert not table.spellings[key.flag].flag.rejection
        assert table.nearest(name) == key.flag


@pytest.mark.parametrize(
    ("theirs", "note"),
    [
        ("algorithm.norm_adv_by_std_in_grpo=null", "must be true or false"),
        ("custom_reward_function.path=null", ""),
        ("custom_reward_function.name=score", "without its file"),
        (
            "trainer.default_local_dir=checkpoints/${trainer.project_name}",
            "refers to another setting",
        ),
    ],
)
def test_values_without_a_meaning_here(theirs: str, note: str) -> None:
    words, notes = hydra.translate_hydra(theirs.split(), (), lambda typed: 0)
    assert words == [] and (note in notes[0] if note else not notes)
