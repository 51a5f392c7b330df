"""The critic on the command line: what follows from the other settings, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from arguments.schema import CriticConfig
from slime_like.advantages import AdvantageSettings
from slime_like.batching.factory import advantage_settings
from slime_like.losses.value_loss import ValueLossConfig
from tests.unit.command_lines import HF_CONFIG, assert_refused, refused
from tests.unit.command_lines import parse_flags as parse
from tests.unit.command_lines import problems_of_flags as problems_of

PPO = "--advantage-estimator ppo --num-steps-per-rollout 2 "


def write_critic(folder: Path, **changes: object) -> None:
    """A Hugging Face folder {folder}/critic, as far as the command line reads it."""
    (folder / "critic").mkdir()
    config = {
        **HF_CONFIG,
        "architectures": ["Qwen2ForTokenClassification"],
        "num_labels": 1,
        "classifier_dropout": 0.1,
    }
    (folder / "critic" / "config.json").write_text(json.dumps({**config, **changes}))


def test_defaults(tmp_path: Path) -> None:
    """--lr of the command line is 1e-5."""
    config = parse(tmp_path, PPO)
    assert config.trains_critic and config.algorithm.lambd == 1.0 and config.warnings == ()
    assert (config.value_loss.value_clip, config.value_loss.value_loss_scale) == (0.2, 0.5)
    critic = config.critic
    assert (
        critic.critic_lr,
        critic.critic_min_lr,
        critic.critic_lr_warmup_iters,
        critic.num_critic_only_steps,
    ) == (1e-5, 0, 0, 0)
    assert critic.critic_load is None
    assert not parse(tmp_path, "--num-steps-per-rollout 2").trains_critic
    assert not parse(tmp_path, PPO + "--debug-rollout-only").trains_critic


def test_what_follows(tmp_path: Path) -> None:
    config = parse(tmp_path, PPO + "--min-lr 1e-6 --critic-lr 2e-4")
    assert config.critic.critic_min_lr == pytest.approx(2e-5), "the policy's share"
    message = parse(tmp_path, PPO + "--min-lr 1e-6 --critic-min-lr 3e-6").critic
    assert (message.critic_lr, message.critic_min_lr) == (1e-5, 3e-6)


def test_the_lambdas_reach_the_estimator(tmp_path: Path) -> None:
    """With the other settings of advantages, each by its own flag."""
    words = (
        "--lambd 0.9 --value-lambd 0.8 --gamma 0.7 --normalize-advantages --singleton-advantage "
        "reward "
        "--disable-grpo-std-normalization --kl-coef 0.1 --ref-load {folder}/hf --use-opd "
        "--opd-type megatron "
        "--opd-teacher-load {folder}/hf --opd-kl-coef 0.6 --opd-prefix-gamma 0.4"
    )
    assert advantage_settings(parse(tmp_path, PPO + words)) == AdvantageSettings(
        "ppo",
        normalize_std=False,
        singleton="reward",
        normalize=True,
        gamma=0.7,
        lambd=0.9,
        value_lambd=0.8,
        kl_coef=0.1,
        distillation_coef=0.6,
        prefix_gamma=0.4,
    )
    by_length = advantage_settings(parse(tmp_path, PPO + "--lambd-length-alpha 0.05"))
    assert by_length == AdvantageSettings("ppo", distillation_coef=1.0, lambd_length_alpha=0.05)


def test_slimes_words(tmp_path: Path) -> None:
    words = (
        "--advantage-estimator gae --num-critic-only-steps 1 --value_clip 1e9 --lambd 0.95 "
        "--critic_lr_warmup_iters 3 --value-loss-scale 1"
    )
    config = parse(tmp_path, words)
    assert (
        config.algorithm.advantage_estimator,
        config.algorithm.lambd,
        config.value_loss.value_clip,
    ) == (
        "ppo",
        0.95,
        1e9,
    )
    assert (
        config.critic.num_critic_only_steps,
        config.critic.critic_lr_warmup_iters,
        config.value_loss.value_loss_scale,
    ) == (1, 3, 1.0)
    assert (
        parse(
            tmp_path, PPO + "--trainer.algorithm.lambd 0.5 --trainer.algorithm.value_clip 0.1"
        ).value_loss.value_clip
        == 0.1
    )


@pytest.mark.parametrize(
    "suffix", ["ForTokenClassification", "ForSequenceClassification", "ForCausalLM"]
)
def test_a_critic_to_start_from(tmp_path: Path, suffix: str) -> None:
    """It may have an output layer of its own or none: it is not used."""
    write_critic(tmp_path, architectures=[f"Qwen2{suffix}"], tie_word_embeddings=False)
    assert parse(tmp_path, PPO + "--critic-load {folder}/critic").critic.critic_load == str(
        tmp_path / "critic"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 2},
            "has another shape than --hf-checkpoint: num_layers 2 (expected: 4)",
        ),
        ({"rope_theta": 5000.0}, "rotary_base 5000.0 (expected: 10000.0)"),
        ({"architectures": ["Qwen2ForQuestionAnswering"]}, "LlamaForCausalLM, "),
    ],
)
def test_a_critic_of_another_shape(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_critic(tmp_path, **changes)
    (found,) = problems_of(tmp_path, PPO + "--critic-load {folder}/critic")
    assert found.flag == "--critic-load" and message in str(found)


def test_a_value_model_is_no_policy(tmp_path: Path) -> None:
    write_critic(tmp_path)
    (found,) = problems_of(tmp_path, "--hf-checkpoint {folder}/critic")
    assert found.flag == "--hf-checkpoint" and "Qwen2ForTokenClassification" in str(found)


VALUES = {"lambd": 0.9, "critic_min_lr": 1e-6, "critic_sequence_parallel": ""}
# name of the rule, or "" for what reading finds; flags; the flag that is named; words
REFUSED = [
    *(("", f"--{name.replace('_', '-')} {VALUES.get(name, 1)}", f"--{name.replace('_', '-')}",
    "only valid with --advantage-estimator ppo")
      for name in ("lambd", "value_lambd", "lambd_length_alpha",
      *(f.name for c in (CriticConfig, ValueLossConfig) for f in dataclasses.fields(c)))),
    ("", PPO + "--critic-lr 1e-4 --critic-min-lr 2e-4", "--critic-min-lr",
     "must not be above --critic-lr 0.0001"),
    ("", PPO + "--critic-min-lr 2e-4", "--critic-min-lr",
     "must not be above --lr 1e-05"),
    ("check_critic_warmup", PPO + "--critic-lr-warmup-iters 9 --lr-decay-iters 9",
     "--critic-lr-warmup-iters", "must be below --lr-decay-iters 9"),
    ("check_critic_warmup", PPO + "--critic-lr-warmup-iters 18 --lr-decay-iters 9 "
     "--critic-steps-per-policy-step 2", "--critic-lr-warmup-iters",
     "must be below --lr-decay-iters 9 times --critic-steps-per-policy-step 2, 18"),
    ("", PPO + "--num-critic-only-steps 3", "--num-critic-only-steps",
     "--num-rollout 2"),
    ("", PPO + "--critic-steps-per-policy-step 0", "--critic-steps-per-policy-step", ">= 1"),
    ("", PPO + "--critic-freeze-params-name-list a --critic-only-train-params-name-list b",
     "--critic-only-train-params-name-list", "--critic-freeze-params-name-list"),
    ("check_parameter_patterns", PPO + "--critic-freeze-params-name-list a(",
     "--critic-freeze-params-name-list", "not a valid regular expression"),
    ("", PPO + "--lora-rank 2 --critic-lora-rank 2 --critic-freeze-params-name-list mlp",
     "--critic-freeze-params-name-list", "--critic-lora-rank"),
    ("check_critic_load", PPO + "--critic-load {folder}/none", "--critic-load", "no such folder"),
    ("check_critic_load", PPO + "--critic-load {folder}", "--critic-load",
     "neither checkpoints nor"),
    ("", PPO + "--critic-save {folder}/critic", "--critic-save", "in every checkpoint in --save"),
    ("", PPO + "--value-clip nan", "--value-clip", "finite number"),
    ("", PPO + "--critic-num-nodes 1", "--critic-num-nodes", "--critic-tensor-model-parallel-size"),
    ("", PPO + "--critic-num-gpus-per-node 1", "--critic-num-gpus-per-node",
     "--critic-tensor-model-parallel-size"),
    ("", PPO + "--critic-tensor-parallel-size 1", "--critic-tensor-parallel-size",
     "did you mean --critic-tensor-model-parallel-size"),
    ("", PPO + "--critic-train-only", "--critic-train-only", "not implemented"),
]  # fmt: skip


def test_a_warm_up_is_in_steps_of_the_critic(tmp_path: Path) -> None:
    """Two rollouts of two steps, on each of which the critic takes two: eight."""
    words = PPO + "--critic-steps-per-policy-step 2 --critic-lr-warmup-iters "
    assert parse(tmp_path, words + "7").warnings == ()
    (warning,) = parse(tmp_path, words + "8").warnings
    assert "the run has 8 optimizer steps" in warning
    parse(tmp_path, words + "17 --lr-decay-iters 9")  # of the policy: 18 of the critic


@refused(REFUSED)
def test_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of(tmp_path, row[1]), row)


def test_supervised_training_has_no_critic(tmp_path: Path) -> None:
    assert {
        p.flag
        for p in problems_of(tmp_path, f"--loss-type sft_loss {PPO} --critic-lr 1e-4 --lambd 0.9")
    } == {
        "--advantage-estimator",
        "--critic-lr",
        "--lambd",
    }
