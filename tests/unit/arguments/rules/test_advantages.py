"""Estimators and the KL in the reward on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.run_config import RunConfig
from slime_like.advantages import TurnEstimator, advantage_estimators
from slime_like.config import Problem
from tests.unit.command_lines import (
    TWO_STEPS,
    assert_refused,
    parse_flags,
    problems_of_flags,
    refused,
)

AGENT = "--agent-command true --use-dynamic-batch-size --max-tokens-per-gpu 99"


def parse(folder: Path, flags: str) -> RunConfig:
    return parse_flags(folder, TWO_STEPS + flags)


def problems_of(folder: Path, flags: str) -> tuple[Problem, ...]:
    return problems_of_flags(folder, TWO_STEPS + flags)


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_every_estimator_by_flag(tmp_path: Path, name: str) -> None:
    whitened = "" if name == "gdpo" else "--normalize-advantages"  # it normalises by itself
    if isinstance(advantage_estimators.get(name), TurnEstimator):
        (found,) = problems_of(tmp_path, f"--advantage-estimator {name}")
        assert "--agent-function-path" in str(found)
        whitened += f" {AGENT}"
    config = parse(tmp_path, f"--advantage-estimator {name} {whitened}")
    assert config.algorithm.advantage_estimator == name
    assert config.algorithm.normalize_advantages == ("--normalize-advantages" in whitened)
    assert all("without --gdpo-reward-keys" in warning for warning in config.warnings)


def test_an_unknown_estimator_lists_the_legal_ones(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, "--advantage-estimator grpoo")
    assert all(name in str(found) for name in advantage_estimators.names())


def test_kl_in_the_reward(tmp_path: Path) -> None:
    flags = (
        "--kl-coef 0.01 --kl-ctrl-type adaptive --kl-target 0.2 --kl-horizon 500 --ref-load "
        "{folder}/hf"
    )
    algorithm = parse(tmp_path, flags).algorithm
    assert (
        algorithm.kl_coef,
        algorithm.kl_ctrl_type,
        algorithm.kl_target,
        algorithm.kl_horizon,
    ) == (0.01, "adaptive", 0.2, 500.0)
    defaults = parse(tmp_path, "").algorithm
    assert (defaults.kl_ctrl_type, defaults.kl_target, defaults.kl_horizon, defaults.gamma) == (
        "fixed",
        0.1,
        10000.0,
        1.0,
    )


def test_skyrls_names(tmp_path: Path) -> None:
    flags = (
        "--trainer.algorithm.use_kl_in_reward=true --trainer.algorithm.kl_loss_coef=0.02 "
        "--trainer.algorithm.kl_ctrl.type=adaptive "
        "--trainer.algorithm.kl_ctrl.kl_target=0.3 --trainer.algorithm.kl_ctrl.horizon=70 "
        "--trainer.algorithm.advantage_batch_normalize "
        "--ref-load {folder}/hf"
    )
    algorithm = parse(tmp_path, flags).algorithm
    assert (algorithm.kl_coef, algorithm.kl_loss_coef, algorithm.kl_ctrl_type) == (
        0.02,
        0.0,
        "adaptive",
    )
    assert (algorithm.kl_target, algorithm.kl_horizon, algorithm.normalize_advantages) == (
        0.3,
        70.0,
        True,
    )
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "trainer:\n  algorithm:\n    use_kl_in_reward: false\n    kl_ctrl:\n      type: fixed\n"
    )
    assert parse(tmp_path, f"--config {run_file}").algorithm.kl_coef == 0


# ends with the keys
PARTS = (
    "--advantage-estimator gdpo --reward-key a --gdpo-reward-weights 1 1 --gdpo-reward-keys a b "
)
# name of the rule, or "" for what reading finds; flags; the flag that is named; words
REFUSED = [
    ("check_whitening", "--advantage-estimator reinforce_plus_plus", "--normalize-advantages",
     "--advantage-estimator reinforce_plus_plus"),
    ("check_whitening", "--advantage-estimator reinforce_plus_plus_baseline",
     "--normalize-advantages", "reinforce_plus_plus_baseline"),
    ("", "--advantage-estimator gdpo --normalize-advantages",
     "--normalize-advantages", "normalises over the rollout itself"),
    ("check_gdpo_rewards", PARTS + "--gdpo-reward-weights 1", "--gdpo-reward-weights",
     "must be 2 numbers"),
    ("check_gdpo_rewards", PARTS + "a", "--gdpo-reward-keys", "duplicate keys"),
    ("", PARTS.replace("gdpo ", "grpo ", 1), "--gdpo-reward-keys", "--advantage-estimator gdpo"),
    ("", PARTS.replace("--reward-key a", ""), "--gdpo-reward-keys",
     "--reward-key"),
    ("", PARTS + "--kl-coef 0.1 --ref-load {folder}/hf", "--gdpo-reward-keys", "--kl-coef"),
    ("", "--gdpo-reward-weights 1 2", "--gdpo-reward-weights", "--gdpo-reward-keys"),
    ("check_energies", "--advantage-estimator otb --use-rollout-logprobs", "--use-rollout-logprobs",
     "--advantage-estimator otb"),
    ("", "--kl-ctrl-type adaptive", "--kl-ctrl-type", "without --kl-coef"),
    ("", "--use-kl-in-reward", "--use-kl-in-reward", "--kl-coef"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of(tmp_path, row[1]), row)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--advantage-estimator otb --singleton-advantage reward",
            "--singleton-advantage reward has no effect with --advantage-estimator otb",
        ),
        *(
            (f"--advantage-estimator {name} --singleton-advantage reward", reason)
            for name, reason in (
                ("ppo", "compares no samples of a prompt"),
                ("remax", "compares no samples of a prompt"),
                ("batch_mean", "compares no samples of a prompt"),
                ("reinforce_plus_plus --normalize-advantages", "compares no samples of a prompt"),
                (f"grpo_turn {AGENT}", "a group of one has advantage 0"),
                (f"grpo_branch {AGENT}", "a group of one has advantage 0"),
                ("grpo_token", "a group of one has advantage 0"),
            )
        ),
        (
            "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --gamma 0.9",
            "--gamma has no effect with --advantage-estimator reinforce_plus_plus_baseline",
        ),
        (
            f"--advantage-estimator grpo_branch --gamma 0.9 {AGENT}",
            "--gamma has no effect with --advantage-estimator grpo_branch",
        ),
        (
            "--n-samples-per-prompt 1 --advantage-estimator otb",
            "--advantage-estimator otb: every advantage is 0",
        ),
        ("--advantage-estimator gdpo", "without --gdpo-reward-keys"),
        (
            "--advantage-estimator ppo --lambd 0.9 --value-lambd 1 --lambd-length-alpha 0.05",
            "--lambd has no effect with both",
        ),
        ("--gamma 0.9", "--gamma has no effect with --advantage-estimator grpo"),
        (
            "--advantage-estimator rloo --disable-grpo-std-normalization",
            "has no effect with --advantage-estimator rloo",
        ),
        ("--kl-target 0.3", "--kl-target has no effect without --kl-ctrl-type adaptive"),
        ("--n-samples-per-prompt 1", "every advantage is 0"),
        (
            "--n-samples-per-prompt 1 --advantage-estimator reinforce_plus_plus_baseline "
            "--normalize-advantages",
            "every advantage is 0",
        ),
    ],
)
def test_warnings(tmp_path: Path, flags: str, message: str) -> None:
    warnings = parse(tmp_path, flags).warnings
    assert len(warnings) == 1 and message in warnings[0]


def test_every_setting_without_effect_is_named(tmp_path: Path) -> None:
    flags = "--gamma 0.9 --singleton-advantage reward --disable-grpo-std-normalization"
    found = parse(tmp_path, f"--advantage-estimator batch_mean {flags}").warnings
    for flag in flags.replace(" 0.9", "").replace(" reward", "").split():
        assert sum(text.startswith(flag) for text in found) == 1, (flag, found)


@pytest.mark.parametrize("name", ["ppo", "remax", "reinforce_plus_plus"])
def test_estimators_without_groups_take_one_sample_for_each_prompt(
    tmp_path: Path, name: str
) -> None:
    assert (
        parse(
            tmp_path,
            f"--advantage-estimator {name} --normalize-advantages --n-samples-per-prompt 1 --gamma "
            "0.9",
        ).warnings
        == ()
    )
