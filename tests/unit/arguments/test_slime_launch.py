"""All 44 launch scripts of slime, as `slime_scripts.json` has their flags: each is taken, or
refused for what this table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.parse import launcher_parser, parse_args
from arguments.run_config import RunConfig
from arguments.translate.settings import translate_settings
from arguments.values import ParsedArgs
from scripts.generate_slime_table import IFBENCH, PAGES, REFUSED, table
from slime_like.config import ConfigError
from tests.unit.arguments.slime_scripts import SlimeScript, command_line, modules_of, slime_scripts
from tests.unit.command_lines import complete

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


# slime's defaults (its arguments.py, and Megatron-LM's where it has none) of what we have too
OF_SLIME = {
    "n_samples_per_prompt": 1, "lr": 1e-6, "lr_decay_style": "linear", "min_lr": 0.0, "weight_decay": 0.01, "clip_grad": 1.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "seed": 1234, "rollout_seed": 42, "gamma": 1.0, "lambd": 1.0,
    "value_clip": 0.2, "value_loss_scale": 1.0, "entropy_coef": 0.0, "kl_coef": 0.0, "kl_loss_coef": 0.0, "kl_loss_type": "k1",
    "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_shuffle": False, "n_samples_per_eval_prompt": 1,
    "num_critic_only_steps": 0, "critic_lr_warmup_iters": 0, "token_tis_ratio_clip_high": 2.0, "token_tis_ratio_clip_low": 0.0,
    "bf16": True, "use_distributed_optimizer": True, "sglang_server_concurrency": 512, "distributed_timeout_minutes": 10.0,
    "micro_batch_size": 1, "input_key": "input", "advantage_estimator": "grpo", "lr_warmup_iters": 0, "opd_kl_coef": 1.0,
}  # fmt: skip
CLIPPED = {
    "grpo": (),
    "gspo": ("eps_clip",),
    "cispo": ("cispo_eps_clip_low", "cispo_eps_clip_high"),
}


def slime_values(*flags: str) -> ParsedArgs:
    parsed = launcher_parser().read(["--actor-num-nodes", "1", *flags])
    assert not parsed.problems
    translate_settings(parsed)
    return parsed


def test_flags_that_are_not_given_have_slimes_defaults() -> None:
    found = slime_values("--use-kl-loss", "--advantage-estimator", "ppo").values
    flags = flag_table().by_dest
    for name, expected in OF_SLIME.items():
        ours = flags[name].default_text or flags[name].default
        value = found.get(name, ours)
        if name == "advantage_estimator":
            value = flags[name].default
        assert value == expected or float(value) == expected, name


@pytest.mark.parametrize("estimator", CLIPPED)
def test_one_clip_range_for_every_loss_that_an_estimator_selects(estimator: str) -> None:
    parsed = slime_values("--advantage-estimator", estimator)
    for name in CLIPPED[estimator]:
        assert parsed.values[name] == 0.2
    noted = any("--eps-clip 0.2 is slime's default" in text for text in parsed.warnings)
    assert noted == bool(CLIPPED[estimator])
    given = slime_values("--advantage-estimator", estimator, "--eps-clip", "0.1").values
    assert given.get("eps_clip", given.get("cispo_eps_clip_low")) == 0.1


def test_what_is_ours_keeps_our_defaults() -> None:
    found = launcher_parser().read(["--use-kl-loss", "--advantage-estimator", "gspo"])
    translate_settings(found)
    assert not {"eps_clip", "kl_loss_type", "lr_decay_style", "lr"} & found.values.keys()


def test_a_critic_that_is_trained_alone() -> None:
    parsed = slime_values("--num-critic-only-steps", "9", "--num-rollout", "4")
    assert parsed.values["num_critic_only_steps"] == 4
    assert any("--num-critic-only-steps 9 is read as 4" in text for text in parsed.warnings)


def test_a_folder_of_load_without_a_checkpoint_is_no_error(tmp_path: Path) -> None:
    """slime starts from --ref-load then; ours are refused."""
    line = complete(tmp_path, "--load", str(tmp_path / "nothing"), "--bf16")
    model = line[line.index("--hf-checkpoint") + 1]
    with pytest.raises(ConfigError, match="no such folder"):
        parse_args([*line, "--ref-load", model], 1)
    launch = ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1")
    config = parse_args([*line, "--ref-load", model, *launch], 1)
    assert config.checkpoint.load is None and config.starts_from == model
    assert any("the policy starts from --ref-load" in text for text in config.warnings)
    assert not any("--ref-load has no effect" in text for text in config.warnings)
    ours = parse_args([*line[: line.index("--load")], "--ref-load", model], 1)
    assert any("--ref-load has no effect" in text for text in ours.warnings)
