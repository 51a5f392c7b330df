"""What a newcomer types: names of other programs, of the Hub, and slips in run files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.parse import parse_args, parse_or_exit
from arguments.translate.names import NAMES_ELSEWHERE
from slime_like.config import ConfigError
from slime_like.distributed.signals import LAUNCHER_STATUS_FILE
from slime_like.import_utils import load_function
from tests.unit.command_lines import complete


def problem_of(argv: list[str]) -> str:
    """The only problem of a command line."""
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, 1)
    (found,) = caught.value.problems
    return str(found)


def of_run_file(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return problem_of(complete(folder, "--config", str(file)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deepspeed", "ds.json"], "megatron-core, without DeepSpeed and FSDP"),
        (["--zero_stage", "3"], "--use-distributed-optimizer shards the optimizer's state"),
        (["--fsdp"], "megatron-core, without DeepSpeed and FSDP"),
        (["--nproc-per-node", "8"], "torchrun starts one process per GPU"),
        (["--model_name_or_path", "x"], "did you mean --hf-checkpoint?"),
        (["--learning_rate", "1"], "did you mean --lr?"),
        (["actor_rollout_ref.actor.optim.lr=1e-6"],
         "actor_rollout_ref.actor.optim.lr (given: '1e-6'): unknown key; did you mean --lr?"),
        (["--critic-learning-rate", "1"], "did you mean --critic-lr?"),
        (["critic.megatron.tensor_model_parallel_size=2"],
         "did you mean --critic-tensor-model-parallel-size?"),
        (["critic.optim.clip_grad=2"], "did you mean --clip-grad?"),
        (["--micro-train-batch-size", "1"], "did you mean --micro-batch-size?"),
        (["--per-device-train-batch-size", "1"], "did you mean --micro-batch-size?"),
        (["data.train_files=x.parquet"], "did you mean --prompt-data?"),
        (["algorithm.adv_estimator=grpo"], "did you mean --advantage-estimator?"),
        (["actor_rollout_ref.rollout.n=8"], "did you mean --n-samples-per-prompt?"),
        (["actor_rollout_ref.actor.use_kl_loss=True"], "did you mean --use-kl-loss?"),
        (["+trainer.no_such=1"], "trainer.no_such (given: '1'): unknown key; see --help"),
        (["--policy-loss-type", "grpo"], "is a value of --advantage-estimator; legal values:"),
        (["--advantage-estimator", "sapo"], "is a value of --policy-loss-type; legal values:"),
    ],
)  # fmt: skip
def test_names_of_other_programs(tmp_path: Path, words: list[str], message: str) -> None:
    assert message in problem_of(complete(tmp_path, *words))


def test_what_is_recommended_for_a_name_is_a_flag_and_the_name_is_none() -> None:
    spellings = flag_table().spellings
    for name, ours in NAMES_ELSEWHERE.items():
        assert not spellings[ours].flag.rejection
        assert f"--{name}" not in spellings


@pytest.mark.parametrize(
    "flag", ["--hf-checkpoint", "--ref-load", "--load", "--opd-teacher-load", "--critic-load"]
)
def test_models_of_the_hub(tmp_path: Path, flag: str) -> None:
    more = {
        "--opd-teacher-load": ["--use-opd", "--opd-type", "megatron"],
        "--critic-load": ["--advantage-estimator", "ppo"],
    }.get(flag, [])
    argv = complete(tmp_path, *more, flag, "Qwen/Qwen3-0.6B", without=(flag,))
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B" in problem_of(argv)


def test_a_folder_of_models_is_no_owner(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--hf-checkpoint", "models/Qwen3-0.6B", without=("--hf-checkpoint",))
    assert "hf download OWNER/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in problem_of(argv)


def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--prompt-data", "openai/gsm8k", without=("--prompt-data",))
    assert "hf download openai/gsm8k --repo-type dataset" in problem_of(argv)


@pytest.mark.parametrize(
    "path", ["{folder}/none", "./none", "none", "models/org/none", "outputs/none"]
)
def test_a_path_is_no_name_of_the_hub(tmp_path: Path, path: str) -> None:
    argv = complete(tmp_path, "--ref-load", path.format(folder=tmp_path))
    assert problem_of(argv).endswith("no such folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\n  kl_coef: 3\n",
         "line 2, column 10: mapping values are not allowed here, at 'kl_coef: 3'"),
        ("lr: 1\nload: 'x\n", "line 3, column 1: found unexpected end of stream "
                              "(while scanning a quoted scalar that starts in line 2)"),
        ("\tlr: 1\n", "line 1, column 1: found character '\\t' that cannot start any token"),
        ("lr: *x\n", "line 1, column 5: found undefined alias 'x', at 'lr: *x'"),
        ("load: !!python/name:os.x 1\n", "line 1, column 7: could not determine a constructor"),
        ("lr: 1\nload: \0\n", "line 2, column 7: the character U+0000 is not allowed"),
        ("lr: " + "[" * 5000, "it is nested too deeply"),
    ],
)  # fmt: skip
def test_no_yaml(tmp_path: Path, text: str, message: str) -> None:
    """One problem, also where the file has all settings."""
    found = of_run_file(tmp_path, text)
    assert f"cannot be read: {message}" in found
    assert "unicode string" not in found and found.count("line 1") <= 1
    assert problem_of(["--config", str(tmp_path / "run.yaml")]) == found


@pytest.mark.parametrize("flag", ["--eval-config", "--custom-config-path"])
def test_no_yaml_in_other_files(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("a: b: c\n")
    more = ["--eval-interval", "1"] if flag == "--eval-config" else []
    argv = complete(tmp_path, *more, flag, str(file))
    assert "line 1, column 5: mapping values are not allowed here" in problem_of(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rolout:\n  rollout_batch_size: 8\n  num_rollout: 3\n",
         "rolout: unknown section; did you mean rollout?"),
        ("trainer:\n  algoritm: {kl_coef: 0}\n",
         "trainer.algoritm: unknown section; did you mean algorithm?"),
        ("optimiser: {weight_decay: 0.1}\n",
         "optimiser: unknown section; did you mean optimizer?"),
        ("sapo: {tau_poss: 0.1}\n",
         "RUN_FILE, line 1: sapo.tau_poss: unknown key; did you mean sapo_tau_pos?"),
        ("lr: 1.0e-3\nalgorithm:\n  policy_loss_typ: ppo\n",
         "RUN_FILE, line 3: algorithm.policy_loss_typ: unknown key; did you mean policy_loss_type?"),
        ("lr: 1e-6x\n", "--lr (given: '1e-6x'): must be a number"),
    ],
)  # fmt: skip
def test_sections_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    found = of_run_file(tmp_path, text)
    assert re.sub(r"\S+\.yaml", "RUN_FILE", found) == message


def test_the_settings_of_a_misspelt_section_are_not_missing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rolout:\n  rollout_batch_size: 8\n  num_rollout: 3\n")
    missing = ("--num-rollout", "--rollout-batch-size")
    argv = complete(tmp_path, "--config", str(file), without=missing)
    assert problem_of(argv) == "rolout: unknown section; did you mean rollout?"


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("--output-dir", ()), ("--save", ()), ("--save-hf", ()), ("--tensorboard-dir", ()),
        ("--wandb-dir", ("--tracker", "wandb", "--wandb-mode", "offline")),
        ("--save-debug-rollout-data", ()),
    ],
)  # fmt: skip
def test_a_folder_in_which_the_system_makes_none(
    tmp_path: Path, flag: str, more: tuple[str, ...]
) -> None:
    """Root may write to /proc, says access(2)."""
    argv = complete(tmp_path, *more, flag, "/proc/x/{rollout_id}")
    assert f"{flag} (given: '/proc/x/{{rollout_id}}'): /proc takes no f" in problem_of(argv)


def test_groups_of_one_are_reported_with_what_helps(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--n-samples-per-prompt", "1", without=("--n-samples-per-prompt",))
    warning = "\n".join(parse_args(argv, 1).warnings)
    assert "raise --n-samples-per-prompt, or take --singleton-advantage reward" in warning


def test_torchruns_own_report_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def message() -> str:
        with pytest.raises(SystemExit):
            parse_or_exit(["--bogus"], 2, 0)
        return capsys.readouterr().err

    monkeypatch.delenv(LAUNCHER_STATUS_FILE, raising=False)
    assert "torchrun" not in message()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert message().rstrip().endswith("python -m slime_like.torchrun, with the same words, leaves "
                                    "it out.")  # fmt: skip
    monkeypatch.setenv(LAUNCHER_STATUS_FILE, "x")
    assert "torchrun" not in message()


@pytest.mark.parametrize("words", [["run.yaml"], ["-config", "run.yaml"]])
def test_a_run_file_without_its_flag(words: list[str]) -> None:
    """Nothing is said to be missing: the run file has it."""
    with pytest.raises(ConfigError) as caught:
        parse_args(words, 1)
    wanted = {
        "run.yaml": "run.yaml: is not a flag; did you mean --config run.yaml?",
        "-config": "-config: flags start with two dashes: --config",
    }
    assert str(caught.value) == f"1 problem in the configuration:\n  - {wanted[words[0]]}"


def test_a_model_that_another_run_file_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the starters that fine-tune first."""
    monkeypatch.chdir(tmp_path)
    argv = complete(tmp_path, "--hf-checkpoint", "sft/hf", without=("--hf-checkpoint",))
    assert "hf download" not in problem_of(argv)
    (tmp_path / "sft.yaml").write_text("checkpoint:\n  save-hf: ./sft/hf\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    assert problem_of(argv).endswith(
        "; sft.yaml writes it: run slime-like train --config sft.yaml first"
    )


def test_a_folder_to_load_without_a_checkpoint(tmp_path: Path) -> None:
    """Found before the imports of a run."""
    (tmp_path / "outputs").mkdir()
    argv = complete(tmp_path, "--load", str(tmp_path / "outputs"))
    assert problem_of(argv).endswith(
        "holds neither checkpoints nor a Hugging Face model (config.json)"
    )


def test_the_functions_of_a_file_are_named(tmp_path: Path) -> None:
    """Those that it defines; the name that was meant; and what a path without one lacks."""
    file = tmp_path / "reward.py"
    file.write_text(
        "from typing import Any\nfrom json import dumps\ndef reward(args, sample): ...\n"
    )
    with pytest.raises(ValueError) as caught:
        load_function(f"{file}:rewrad", "--custom-rm-path")
    assert str(caught.value).endswith(
        "has no 'rewrad'; did you mean reward?; its functions: reward"
    )
    with pytest.raises(ValueError) as caught:
        load_function(str(file), "--custom-rm-path")
    assert str(caught.value).endswith(
        f"name the function after a colon: {file}:reward; its functions: reward"
    )
