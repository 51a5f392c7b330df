"""Schedules that do not fit the length of a run, and rewards that do not fit an estimator, are
reported before or as soon as they are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.rules.learning_rate import run_warnings
from slime_like.trainer.factory import make_strategy
from slime_like.trainer.strategy import ReinforcementLearning
from tests.unit.command_lines import complete
from tests.unit.rollout.test_metrics import make

# 10 rollouts of 2 optimizer steps
SIZE = ("--num-rollout", "10", "--num-steps-per-rollout", "2")


def warnings_of(folder: Path, flags: str) -> list[str]:
    config = parse_args(complete(folder, *SIZE, *flags.split(), without=("--num-rollout",)), 1)
    return [
        text for text in config.warnings if "iters" in text or "warmup" in text or "maxrl" in text
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr-warmup-iters 20", "--lr-warmup-iters 20: the run has 20 optimizer steps, all of them"),
        ("--lr-warmup-iters 100", "never reaches --lr"),
        ("--lr-decay-style cosine --lr-decay-iters 100 --lr-warmup-fraction 0.5",
         "--lr-warmup-fraction 0.5 of --lr-decay-iters 100: the run has 20"),
        ("--lr-decay-style linear --lr-decay-iters 10",
         "--lr-decay-iters 10: the learning rate is 0 from then on, and the run has 20"),
        ("--lr-decay-style cosine --lr-decay-iters 17", "the last 3 change nothing"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 30", "--lr-wsd-decay-iters 30: only 20 steps"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 15 --lr-warmup-iters 8", "only 12 steps"),
        ("--advantage-estimator ppo --critic-lr 1e-5 --critic-lr-warmup-iters 20",
         "--critic-lr-warmup-iters 20: the run has 20"),
        # the first rollouts train the critic only
        ("--advantage-estimator ppo --num-critic-only-steps 5 --lr-warmup-iters 12",
         "--lr-warmup-iters 12: the run has 10 optimizer steps"),
        ("--advantage-estimator maxrl --rm-type dapo", "--rm-type dapo gives 1 and -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_run_is_reported(tmp_path: Path, flags: str, words: str) -> None:
    (text,) = warnings_of(tmp_path, flags)
    assert words in text


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr-warmup-iters 19",
        "--lr-decay-style cosine",
        "--lr-decay-style cosine --lr-decay-iters 18",
        "--lr-decay-style cosine --lr-decay-iters 10 --min-lr 1e-7",
        "--lr-decay-style inverse-square-root --lr-decay-iters 10",
        "--lr-decay-style WSD --lr-wsd-decay-iters 20",
        "--advantage-estimator maxrl --rm-type math",
        "--advantage-estimator grpo --rm-type dapo",
    ],
)
def test_what_fits_is_not(tmp_path: Path, flags: str) -> None:
    assert warnings_of(tmp_path, flags) == []


def test_a_run_of_epochs_is_reported_when_its_length_is_known(tmp_path: Path) -> None:
    flags = ("--num-epoch", "3", "--lr-warmup-iters", "20")
    config = parse_args(complete(tmp_path, *flags, without=("--num-rollout",)), 1)
    assert not [text for text in config.warnings if "warmup" in text]
    assert list(run_warnings(config, 21)) == []
    (text,) = run_warnings(config, 20)
    assert "never reaches --lr" in text


def test_epochs_of_the_critic_alone_are_none_of_the_policy(tmp_path: Path) -> None:
    flags = "--num-epoch 3 --lr-warmup-iters 20 --advantage-estimator ppo --num-critic-only-steps 1"
    config = parse_args(complete(tmp_path, *flags.split(), without=("--num-rollout",)), 1)
    assert list(run_warnings(config, 22)) == []
    (text,) = run_warnings(config, 21)
    assert "has 20 optimizer steps" in text


def test_negative_rewards_of_any_function_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_args(complete(tmp_path, "--advantage-estimator", "maxrl"), 1)
    samples = [replace(make(i, r), weight_versions=()) for i, r in enumerate((1.0, -1.0, 0.0))]
    for estimator, count in (("maxrl", 1), ("grpo", 0)):
        caplog.clear()
        algorithm = replace(config.algorithm, advantage_estimator=estimator)
        strategy = make_strategy(replace(config, algorithm=algorithm))
        assert isinstance(strategy, ReinforcementLearning)
        with caplog.at_level("WARNING"):
            for _ in range(2):
                strategy.check_samples(0, samples, {}, weight_version=2)
        assert caplog.text.count("1 of 3 rewards are negative") == count
