"""Launch lines of other people: what asks for nothing, or says twice the same, is taken; where two
flags set one thing, slime's order applies, with a warning."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from arguments.eval_sets import EvalSet
from arguments.parse import parse_args
from arguments.run_config import RunConfig
from arguments.schema import RewardConfig
from slime_like.config import ConfigError
from slime_like.engines.sglang.factory import make_router
from slime_like.rollout.evaluate import reward_of
from slime_like.servers.processes import free_ports
from tests.unit.arguments.hf.test_gpt_oss import write as write_gpt_oss
from tests.unit.command_lines import complete, problems_of


def parse(folder: Path, flags: str, without: Sequence[str] = ()) -> RunConfig:
    return parse_args(complete(folder, *flags.split(), without=tuple(without)), 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--megatron-to-hf-mode bridge", "--megatron-to-hf-mode has no effect here"),
        ("--custom-rm-path json.dumps", "--rm-type is ignored: --custom-rm-path takes precedence"),
        ("--no-save-optim --no-save-rng", "--no-save-optim has no effect without --save"),
        ("--no-load-optim --no-load-rng", "--no-load-optim has no effect without --load"),
        ("--num-epoch 3", "--num-epoch is ignored: --num-rollout takes precedence"),
    ],
)
def test_what_is_not_used_is_a_warning(tmp_path: Path, flags: str, words: str) -> None:
    config = parse(tmp_path, flags)
    assert any(words in warning for warning in config.warnings), config.warnings
    assert config.rollout.num_epoch is None and config.rollout.num_rollout == 2
    assert (config.reward.rm_type is None) == ("--custom-rm-path" in flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--lora-dropout 0.0", "--lora-rank 8 --lora-dropout 0", "--eval-min-new-tokens 0",
        "--start-rollout-id 0", "--ckpt-format torch_dist", "--update-weights-interval 1",
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_taken(tmp_path: Path, flags: str) -> None:
    plain = parse(tmp_path, "--lora-rank 8" if "--lora-rank" in flags else "")
    config = parse(tmp_path, flags)
    assert config.warnings == plain.warnings and config.lora == plain.lora
    file = tmp_path / "run.yaml"
    words = flags.replace("--", "").split()
    if len(words) == 2:
        file.write_text(f"{words[0].replace('-', '_')}: {words[1]}\n")
        assert parse(tmp_path, f"--config {file}").warnings == plain.warnings


@pytest.mark.parametrize("flag", ["--lora-dropout 0.1", "--eval-min-new-tokens 1", "--ckpt-format torch"])  # fmt: skip
def test_what_asks_for_something_is_refused(tmp_path: Path, flag: str) -> None:
    (found,) = problems_of(complete(tmp_path, *flag.split()))
    assert found.flag == flag.split()[0] and "not implemented" in str(found)


def test_choices_may_be_joined_by_commas(tmp_path: Path) -> None:
    for words in ("q_proj,k_proj", "q_proj k_proj", "q_proj, k_proj"):
        config = parse(tmp_path, f"--lora-rank 8 --lora-target-modules {words}")
        assert config.lora.lora_target_modules == ["q_proj", "k_proj"]
    with pytest.raises(ConfigError, match="unknown value"):
        parse(tmp_path, "--lora-rank 8 --lora-target-modules q_proj,x_proj")


def test_a_setting_that_has_another_name_is_reported(tmp_path: Path) -> None:
    (found,) = problems_of(complete(tmp_path, "--disable-rewards-normalization"))
    assert "--custom-reward-post-process-path" in str(found)


RESTATED = (
    "--softmax-type learnable --window-size {window} --window-attn-skip-freq {freq} --quick-geglu "
    "--activation-func-clamp-value 7.0 --glu-linear-offset 1.0 --position-embedding-type {rope} "
    "--yarn-rotary-scaling-factor 32.0 --yarn-original-max-position-embeddings 4096 "
    "--yarn-beta-fast 32 --yarn-beta-slow 1 --rotary-scaling-factor 32"
)


@pytest.mark.parametrize("rope", ["rope", "yarn"])
@pytest.mark.parametrize("window", ["128,0", "127,0", "127 0", "(128,0)"])
@pytest.mark.parametrize("freq", ["2", "[1,0]*12"])
def test_gpt_oss_may_be_restated(tmp_path: Path, window: str, freq: str, rope: str) -> None:
    (tmp_path / "model").mkdir()
    flags = RESTATED.format(window=window, freq=freq, rope=rope)
    model = ("--hf-checkpoint", write_gpt_oss(tmp_path / "model"))
    line = complete(tmp_path, *model, without=("--hf-checkpoint",))
    assert parse_args([*line, *flags.split()], 1).gpt == parse_args(line, 1).gpt


@pytest.mark.parametrize(
    "flag",
    [
        "--softmax-type vanilla", "--window-size 64,0", "--window-attn-skip-freq 3", "--rotary-scaling-factor 8",
        "--window-attn-skip-freq [0,1]*12", "--glu-linear-offset 0", "--yarn-beta-fast 16", "--window-attn-skip-freq x",
    ],
)  # fmt: skip
def test_other_settings_than_gpt_oss_has_are_refused(tmp_path: Path, flag: str) -> None:
    (tmp_path / "model").mkdir()
    model = ("--hf-checkpoint", write_gpt_oss(tmp_path / "model"))
    line = complete(tmp_path, *model, *flag.split(), without=("--hf-checkpoint",))
    (found,) = problems_of(line)
    assert found.flag == flag.split()[0] and "conflicts with --hf-checkpoint" in str(found)


def test_yarn_needs_a_checkpoint(tmp_path: Path) -> None:
    found = problems_of(complete(tmp_path, "--position-embedding-type", "yarn"))
    assert [p.flag for p in found] == ["--position-embedding-type"]


def test_the_port_of_the_router_that_the_run_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = parse(tmp_path, "").sglang
    router = make_router(dataclasses.replace(config, sglang_router_port=port), tmp_path)
    assert router is not None and router.is_ours
    router.close()
    assert router.url.endswith(f":{port}")


def test_a_key_of_the_rows_may_be_a_path(tmp_path: Path) -> None:
    line = complete(tmp_path, "--label-key", "reward_model.ground_truth", without=("--label-key",))
    row = {"input": "1 + 1", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    assert parse_args(line, 1).data.label_key == "reward_model.ground_truth"
    (found,) = problems_of([*line, "--input-key", "prompt.text"])
    assert found.flag == "--input-key" and "no such key" in str(found)


@pytest.mark.parametrize(
    ("of_set", "expected"),
    [
        ({}, {"custom_rm_path": "mine.f", "reward_key": "acc", "group_rm": True}),
        ({"custom_rm_path": "its.f"}, {"custom_rm_path": "its.f", "reward_key": "acc"}),
        ({"rm_type": "math"}, {"rm_type": "math", "reward_key": "acc", "custom_rm_path": None}),
        (
            {"rm_type": "math", "custom_rm_path": "its.f"},
            {"rm_type": None, "custom_rm_path": "its.f"},
        ),
    ],
)
def test_the_reward_key_of_evaluations(of_set: dict[str, Any], expected: dict[str, Any]) -> None:
    reward = RewardConfig(custom_rm_path="mine.f", reward_key="score", group_rm=True)
    found = reward_of(EvalSet("a", "a.jsonl", **of_set), reward, "acc")
    assert found is not None
    assert {key: getattr(found, key) for key in expected} == expected
    own = reward_of(EvalSet("a", "a.jsonl", **of_set), reward, None)
    assert (own is None) == (not of_set) and (own is None or own.reward_key == "score")
