"""All 44 launch scripts of slime, as `slime_scripts.json` has their flags: each is taken, or
refused for what this table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from scripts.generate_slime_table import IFBENCH, PAGES, REFUSED, table
from slime_like.config import ConfigError
from tests.unit.arguments.slime_scripts import SlimeScript, command_line, modules_of, slime_scripts

SCRIPTS = slime_scripts()


def parse(script: SlimeScript, folder: Path, *more: str) -> RunConfig:
    """Of the job that the script starts, on a machine without GPUs."""
    argv = [*command_line(script, folder), "--preflight", *more]
    with modules_of(script, folder):
        return parse_args(argv, 1)


def test_the_table_knows_every_script() -> None:
    assert len(SCRIPTS) == 44 and set(REFUSED) < set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_taken(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    config = parse(script, tmp_path)
    assert config.world_size == script.world_size
    assert config.megatron.transformer.bf16 and config.megatron.ddp.use_distributed_optimizer
    layers = script.of("--num-layers")
    assert layers is not None and config.megatron.transformer.num_layers == int(layers[0])
    servers = script.of("--rollout-num-gpus") or [str(script.world_size)]
    if script.of("--loss-type") is None:
        assert config.rollout.rollout_engine == "sglang"
        assert config.sglang.rollout_num_gpus == int(servers[0])


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str, tmp_path: Path) -> None:
    feature = REFUSED[name]
    if feature is IFBENCH and importlib.util.find_spec("ifbench") is not None:
        parse(SCRIPTS[name], tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        parse(SCRIPTS[name], tmp_path)
    expected = " ".join(str(problem) for problem in caught.value.problems)
    assert feature.message in expected


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num-layers", "35"),
        ("--hidden-size", "2048"),
        ("--rotary-base", "10000"),
        ("--layernorm-epsilon", "1e-05"),
        ("--rotary-percent", "0.5"),
        ("--kv-lora-rank", "512"),
        ("--model-name", "llama"),
        ("--multi-latent-attention", ""),
        ("--use-gated-attention", ""),
        ("--add-qkv-bias", ""),
        ("--actor-num-gpus-per-node", "3"),
    ],
)
def test_a_difference_to_the_checkpoint_or_the_world_is_reported(
    flag: str, value: str, tmp_path: Path
) -> None:
    """With the flag, its value and what is there."""
    script = SCRIPTS["scripts/run-qwen3-4B.sh"]
    with pytest.raises(ConfigError) as caught:
        parse(script, tmp_path, *([flag, value] if value else [flag]), "--world-size", "8")
    expected = [str(problem) for problem in caught.value.problems]
    assert any(flag.removeprefix("--") in words and value in words for words in expected), expected


def test_multi_token_prediction_is_trained(tmp_path: Path) -> None:
    """In the script that has too many expert-parallel ranks too, once it has fewer."""
    for name, more in {
        "scripts/run-mimo-7B-rl-eagle.sh": (),
        "scripts/run-glm4.7-30B-A3B.sh": ("--expert-model-parallel-size", "4"),
    }.items():
        gpt = parse(SCRIPTS[name], tmp_path, *more).gpt
        assert gpt.mtp_num_layers == 1 and gpt.mtp_loss_scaling_factor == 0.2


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_the_table(page: Path) -> None:
    assert table(page) in page.read_text(encoding="utf-8"), (
        "out of date; run python scripts/generate_slime_table.py"
    )


def test_what_is_not_proved_is_reported(tmp_path: Path) -> None:
    """Latent attention over context-parallel ranks with Transformer Engine's layers."""
    script = SCRIPTS["scripts/run-moonlight-16B-A3B.sh"]
    config = parse(script, tmp_path, "--context-parallel-size", "2")
    assert any("multi-latent attention is tested with" in words for words in config.warnings)
