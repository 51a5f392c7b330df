"""Adapters on the command line: what is refused, in words that name flag, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arguments.hf.peft_adapter import adapter_config, read_adapter_config
from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.engines.sglang.factory import adapter_needs
from slime_like.megatron.lora import critic_lora_spec, lora_spec
from tests.unit.command_lines import (
    TWO_STEPS,
    complete,
    parse_flags,
    problems_of,
    problems_of_flags,
    write_files,
)


def parse(folder: Path, flags: str) -> RunConfig:
    return parse_flags(folder, TWO_STEPS + flags)


def write_adapter(folder: Path, **changes: object) -> None:
    folder.mkdir()
    config = {**adapter_config(rank=8, alpha=16.0, modules=["q_proj"], base_model=None), **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_defaults_and_groups(tmp_path: Path) -> None:
    assert parse(tmp_path, "").lora.lora_rank == 0
    config = parse(tmp_path, "--lora-rank 8")
    assert config.lora.lora_alpha == 32 and lora_spec(config.lora, 1).scale == 4
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} < lora_spec(config.lora, 1).targets
    assert lora_spec(parse(tmp_path, "--lora-rank 8 --target-modules attn up_proj").lora,
    1).targets == {
        "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
        "kv_b_proj", "up_proj"
    }  # fmt: skip


def test_the_critic_has_the_policys_modules_without_the_output_layer(tmp_path: Path) -> None:
    config = parse(
        tmp_path,
        f"{PPO} --lora-rank 8 --critic-lora-rank 2 --lora-alpha 6 --lora-target-modules attn "
        "unembed",
    )
    critic = critic_lora_spec(config.lora, config.critic.critic_lora_rank, config.model.seed)
    assert critic.value_head and critic.rank == 2 and critic.scale == 3
    assert lora_spec(config.lora, 1).targets - critic.targets == {"lm_head"}


def test_the_reference_is_the_base(tmp_path: Path) -> None:
    hf = write_files(tmp_path)["hf"]
    kl = "--lora-rank 8 --use-kl-loss --kl-loss-coef 0.1 "
    assert parse(tmp_path, kl).reference_is_base
    assert parse(tmp_path, f"{kl} --ref-load {hf}/../hf").reference_is_base
    assert not parse(
        tmp_path, f"--use-kl-loss --kl-loss-coef 0.1 --ref-load {hf}"
    ).reference_is_base


PPO = "--advantage-estimator ppo"
EXPERTS: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "norm_topk_prob": True,
}
REFUSED = [
    ("check_lora_targets", "--lora-rank 4 --lora-target-modules lm_head --rollout-engine sglang "
     "--rollout-external-engine-addrs 127.0.0.1:1 --no-sglang-router",
     "shares its weight with the embedding"),
    ("", "--lora-sync adapter", "has no effect without --lora-rank"),
    ("check_lora_sync", "--lora-rank 4 --lora-sync adapter --loss-type sft_loss",
     "--lora-sync (given: 'adapter'): requires --rollout-engine local, sglang or vllm"),
    ("", "--lora-alpha 4", "has no effect without --lora-rank"),
    ("", "--lora-save-path {folder}/x", "has no effect without --lora-rank"),
    ("", "--lora-rank 4 --lora-dropout 0.1", "--lora-dropout"),
    ("", "--lora-rank 4 --exclude-modules q_proj", "use --lora-target-modules"),
    ("check_lora_base", "--lora-rank 4 --load {folder}/hf", "set it as --hf-checkpoint"),
    ("", "--lora-rank 4 --debug-rollout-only",
     "--debug-rollout-only: cannot be combined with --lora-rank"),
    ("", "--lora-rank 4 --decoupled-lr 1e-3",
     "--decoupled-lr (given: 0.001): cannot be combined with --lora-rank 4, which freezes the "
     "embedding and the output layer; remove it"),
    ("check_lora_base",
     "--lora-rank 4 --use-kl-loss --kl-loss-coef 0.1 --ref-load {folder}/hf --ref-offload",
     "the reference is the model without"),
    ("check_lora_adapter_path", "--lora-rank 4 --lora-adapter-path {folder}/none",
     "adapter_config.json cannot be read"),
    ("check_lora_adapter_path", "--lora-rank 4 --lora-alpha 16 --lora-adapter-path {folder}/adapter",
     "--lora-rank (given: 4): is 8 in --lora-adapter-path"),
    ("check_lora_adapter_path", "--lora-rank 8 --lora-adapter-path {folder}/adapter",
     "--lora-alpha (given: 32.0): is 16 in --lora-adapter-path"),
    ("check_lora_adapter_path", "--lora-rank 8 --lora-alpha 16 --lora-adapter-path {folder}/dora",
     "use_dora is True, which is not supported"),
    ("check_critic_lora", f"{PPO} --critic-lora-rank 4",
     "--critic-lora-rank (given: 4): requires --lora-rank"),
    ("", "--lora-rank 4 --critic-lora-rank 4",
     "--critic-lora-rank (given: 4): only valid with --advantage-estimator ppo"),
    ("", f"{PPO} --lora-rank 4 --critic-lora-rank 4 --critic-load {{folder}}/hf",
     "cannot be combined with --critic-lora-rank 4, which takes the base model of the policy"),
    ("", f"{PPO} --lora-rank 4 --critic-lora-rank 4 --lora-target-modules unembed",
     "a critic has no output layer; add attn or mlp"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "flags", "words"), REFUSED)
def test_refused(tmp_path: Path, rule: str, flags: str, words: str) -> None:
    write_adapter(tmp_path / "adapter")
    write_adapter(tmp_path / "dora", use_dora=True)
    (found,) = problems_of_flags(tmp_path, TWO_STEPS + flags)
    assert words in str(found)


SENT = (
    "--lora-rank 4 --lora-sync adapter --rollout-engine sglang --no-sglang-router "
    "--rollout-external-engine-addrs 127.0.0.1:1 "
)
ATTENTION = f"{SENT} --lora-target-modules attn "
NOT_SENT: list[tuple[str, dict[str, object], str]] = [
    (f"{ATTENTION} --update-weight-transport disk --update-weight-mode delta", {},
     "sends adapters whole; remove --update-weight-mode delta"),
    (f"{ATTENTION} --colocate", {}, "requires servers that keep their base model: remove --colocate"),
    (f"{ATTENTION} --rollout-engine vllm", {},
     "with vLLM requires --update-weight-transport disk; add it"),
    (f"{ATTENTION} --rollout-engine vllm --lora-rank 600 --update-weight-transport disk", {},
     "vLLM serves adapters of a rank of at most 512"),
    (SENT, {"intermediate_size": 48}, "without a GPU SGLang pads an MLP of 48 units"),
    (f"{ATTENTION} --rollout-engine vllm --update-weight-transport disk", EXPERTS,
     "with vLLM serves no mixtures of experts; use sglang, local, or --lora-sync merged"),
    (SENT, EXPERTS, "engines apply no adapters to experts (down_proj, gate_proj, up_proj): use "
     "--lora-target-modules attn"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "changes", "words"), NOT_SENT)
def test_adapters_that_servers_do_not_apply(
    tmp_path: Path, flags: str, changes: dict[str, object], words: str
) -> None:
    line = complete(tmp_path, *flags.split())
    write_files(tmp_path, **changes)
    found = [problem for problem in problems_of(line) if problem.flag == "--lora-sync"]
    assert [words in str(problem) for problem in found] == [True], found


MISSING = [
    ("q_proj", ["v_proj"]),
    ("q_proj o_proj", ["v_proj"]),
    ("q_proj k_proj", ["v_proj"]),
    ("v_proj", ["q_proj"]),
    ("k_proj v_proj", ["q_proj"]),
    ("k_proj", ["q_proj v_proj"]),
    ("up_proj down_proj", ["gate_proj"]),
    ("k_proj up_proj", ["q_proj v_proj", "gate_proj"]),
    ("q_proj v_proj", []),
    ("q_proj k_proj v_proj up_proj gate_proj", []),
    ("gate_proj", []),
    ("o_proj down_proj", []),
]


@pytest.mark.parametrize(("modules", "missing"), MISSING)
def test_sglang_joins_adapters_of_fused_layers(
    tmp_path: Path, modules: str, missing: list[str]
) -> None:
    """An incomplete set would fail once the servers are up."""
    line = complete(tmp_path, *f"{SENT} --lora-target-modules {modules}".split())
    write_files(tmp_path, intermediate_size=64)
    if not missing:
        assert parse_args(line, 1).sends_adapter
        return
    found = [str(p) for p in problems_of(line) if p.flag == "--lora-sync"]
    assert len(found) == len(missing), found
    for words, names in zip(found, missing, strict=True):
        assert f"add {names} to --lora-target-modules, or use --lora-sync merged" in words


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_adapters_that_servers_apply(tmp_path: Path, changes: dict[str, object]) -> None:
    """Also of an output layer that is tied to the embedding, which merged cannot be sent."""
    line = complete(tmp_path, *f"{SENT} --lora-target-modules attn unembed".split())
    write_files(tmp_path, **changes)
    config = parse_args(line, 1)
    assert config.sends_adapter and config.unties_output_layer
    needs = adapter_needs(config)
    assert needs is not None
    assert needs.modules == ("k_proj", "lm_head", "o_proj", "q_proj", "v_proj")


def test_the_critics_adapter_is_in_the_policys_layout(tmp_path: Path) -> None:
    flags = f"{PPO} {TWO_STEPS} --lora-rank 4 --critic-lora-rank 4 --tensor-model-parallel-size 2"
    other = ("--critic-tensor-model-parallel-size", "1")
    (found,) = problems_of(complete(tmp_path, *flags.split(), *other), world_size=2)
    assert found.flag == "--critic-lora-rank"
    assert "remove --critic-tensor-model-parallel-size" in found.message


def test_overlap_has_no_effect(tmp_path: Path) -> None:
    config = parse(
        tmp_path,
        "--lora-rank 4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    )
    assert any(
        "--overlap-grad-reduce and --overlap-param-gather have no effect" in words
        for words in config.warnings
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"r": 0},
        {"r": True},
        {"lora_alpha": "x"},
        {"bias": "all"},
        {"rank_pattern": {"q": 2}},
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    write_adapter(tmp_path / "adapter", **changes)
    with pytest.raises(ValueError, match="adapter_config"):
        read_adapter_config(str(tmp_path / "adapter"))
