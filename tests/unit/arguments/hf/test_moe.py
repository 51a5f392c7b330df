"""Mixtures of experts on the command line: config.json of the three families, flags that contradict
it, layouts that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.hf.moe import layer_pattern, moe_layers
from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from arguments.rules.moe import MOE_WARNINGS
from slime_like.config import ConfigError
from tests.unit.command_lines import HF_CONFIG, complete, problems_of

QWEN3_MOE: dict[str, Any] = {
    **HF_CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
MIXTRAL = {
    **HF_CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "router_jitter_noise": 0.0,
}


DEEPSEEK_V3: dict[str, Any] = {
    **HF_CONFIG,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": HF_CONFIG["num_attention_heads"],
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def moe_of(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    fields = read_hf_model(write(folder, config)).transformer
    return {name: value for name, value in fields.items() if "moe" in name}


def test_qwen3_moe(tmp_path: Path) -> None:
    found = moe_of(tmp_path, QWEN3_MOE)
    assert found == {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
    }
    renamed = {
        ("num_local_experts" if key == "num_experts" else key): value
        for key, value in QWEN3_MOE.items()
    }
    assert moe_of(tmp_path, renamed) == found  # transformers 5 writes it so
    assert (
        moe_of(tmp_path, {**QWEN3_MOE, "norm_topk_prob": False})["moe_router_pre_softmax"] is True
    )


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"mlp_only_layers": [0, 2]}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
        ({"mlp_only_layers": None}, 1),
    ],
)
def test_dense_layers(tmp_path: Path, changes: dict[str, Any], pattern: int | list[int]) -> None:
    """As Qwen3MoeDecoderLayer chooses: not in mlp_only_layers, and (layer + 1) %
    decoder_sparse_step == 0."""
    assert moe_of(tmp_path, {**QWEN3_MOE, **changes})["moe_layer_freq"] == pattern


def test_mixtral_and_qwen2_moe(tmp_path: Path) -> None:
    mixtral = moe_of(tmp_path, MIXTRAL)
    assert (
        mixtral["moe_ffn_hidden_size"],
        mixtral["moe_router_pre_softmax"],
        mixtral["moe_layer_freq"],
    ) == (128, False, 1)
    qwen2 = {
        **QWEN3_MOE,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 40,
    }
    qwen2 = {**qwen2, "norm_topk_prob": False, "qkv_bias": True}
    del qwen2["head_dim"]
    shared = moe_of(tmp_path, qwen2)
    assert (shared["moe_shared_expert_intermediate_size"], shared["moe_shared_expert_gate"]) == (
        40,
        True,
    )
    assert shared["moe_router_pre_softmax"] is True
    with pytest.raises(ConfigError, match="qkv_bias False"):
        read_hf_model(write(tmp_path, {**qwen2, "qkv_bias": False}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "above the number of experts"),
        ({**QWEN3_MOE, "num_experts_per_tok": 1}, "the router would never learn"),
        ({**QWEN3_MOE, "decoder_sparse_step": 5}, "no layer with experts"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN3_MOE, "n_shared_experts": 2}, "n_shared_experts 2 is unknown"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "noise on the router's input"),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 64},
         "sliding windows are not supported"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is missing"),
        ({**HF_CONFIG, "num_experts": 8}, "num_experts 8 is unknown"),
        ({**HF_CONFIG, "architectures": ["DeepseekV2ForCausalLM"]},
         "DeepseekV2ForCausalLM is not supported"),
        ({**DEEPSEEK_V3, "topk_group": 1}, "scores a group by its best"),
        ({**DEEPSEEK_V3, "norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave False is not supported"),
        ({**DEEPSEEK_V3, "model_type": "kimi_k3"}, "does not go with"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 2}, "latent attention has no groups"),
        ({**DEEPSEEK_V3, "rope_scaling": {"type": "yarn", "factor": 4.0}},
         "needs original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_model(write(tmp_path, config))
    assert expected in str(caught.value)


def test_layer_patterns() -> None:
    assert layer_pattern("[0]*2+[1]*3") == [0, 0, 1, 1, 1] == layer_pattern("([0] * 2 + [1] * 3)")
    assert (
        layer_pattern("[1,0,1]") == [1, 0, 1]
        and layer_pattern("2") == 2
        and layer_pattern("[1]*4") == 1
    )
    for wrong in ("0", "x", "[2]", "[1]*x", "[1]+", "1.5", "__import__('os')"):
        with pytest.raises(ValueError, match="must be a number, or a list"):
            layer_pattern(wrong)
    assert moe_layers(2, 5) == [True, False, True, False, True]
    assert moe_layers([0, 1], 2) == [False, True] and moe_layers(None, 2) == [False, False]


TP2 = "--tensor-model-parallel-size 2"
# rule, flags, processes, the flag that is named, words of the message
CASES = [
    ("check_expert_parallel_sizes", "--expert-model-parallel-size 3", 3,
     "--expert-model-parallel-size", "divisor of 8"),
    ("check_expert_parallel_sizes", "--expert-model-parallel-size 4", 2,
     "--expert-model-parallel-size", "does not divide the 2 processes"),
    ("check_expert_parallel_sizes", "--expert-tensor-parallel-size 5", 5,
     "--expert-tensor-parallel-size", "--moe-ffn-hidden-size 24"),
    ("check_expert_sequence_parallel", TP2, 2, "--sequence-parallel", "required for experts with"),
    (
        "check_expert_tensor_parallel",
        f"{TP2} --sequence-parallel --expert-tensor-parallel-size 1", 2,
        "--expert-tensor-parallel-size", "requires --expert-model-parallel-size above 1",
    ),
    ("check_expert_tensor_parallel", "--expert-tensor-parallel-size 2", 2,
     "--expert-tensor-parallel-size", "--expert-model-parallel-size above 1"),
    (
        "check_token_dispatcher",
        "--pipeline-model-parallel-size 2 --moe-token-dispatcher-type allgather", 2,
        "--moe-token-dispatcher-type", "use alltoall",
    ),
    ("", "--moe-grouped-gemm", 1, "--moe-grouped-gemm", "without layers of Transformer Engine"),
    ("", "--moe-permute-fusion", 1, "--moe-permute-fusion", "without layers of Transformer Engine"),
    ("check_load_balancing", "--moe-aux-loss-coeff 0.1 0.2", 1, "--moe-aux-loss-coeff",
     "--moe-router-load-balancing-type"),
    ("check_load_balancing", "--moe-aux-loss-coeff -1", 1, "--moe-aux-loss-coeff", "must be >= 0"),
    ("check_load_balancing", "--moe-z-loss-coeff -1", 1, "--moe-z-loss-coeff", "must be >= 0"),
    (
        "check_load_balancing", "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", 1,
        "--moe-aux-loss-coeff", "has no effect with",
    ),
    (
        "check_load_balancing",
        "--moe-router-load-balancing-type none aux_loss --moe-aux-loss-coeff 0 0.1", 1,
        "--moe-router-load-balancing-type", "cannot be combined",
    ),
    ("check_router", "--moe-router-topk 4", 1, "--moe-router-topk",
     "conflicts with --hf-checkpoint's 2"),
    ("check_router", "--moe-router-enable-expert-bias", 1, "--moe-router-enable-expert-bias",
     "which has none"),
    ("check_routing_replay", "--use-routing-replay --use-rollout-logprobs", 1,
     "--use-routing-replay", "--use-rollout-logprobs"),
    (
        "", "--use-rollout-routing-replay --loss-type sft_loss", 1, "--use-rollout-routing-replay",
        "--loss-type sft_loss",
    ),
    ("", "--num-experts 4", 1, "--num-experts", "conflicts with --hf-checkpoint's 8"),
    ("", "--moe-shared-expert-intermediate-size 4", 1, "--moe-shared-expert-intermediate-size",
     "which has none"),
    ("", "--moe-router-load-balancing-type sinkhorn", 1, "--moe-router-load-balancing-type",
     "not implemented"),
    ("", "--moe-layer-freq [1,2]", 1, "--moe-layer-freq", "must be a number, or a list"),
    ("", "--moe-input-jitter-eps 0.1", 1, "--moe-input-jitter-eps", "not implemented"),
]  # fmt: skip


def on_experts(folder: Path, flags: str) -> list[str]:
    argv = complete(folder, *flags.split())
    write(folder / "hf", QWEN3_MOE)
    return argv


@pytest.mark.parametrize(
    ("rule", "flags", "world_size", "flag", "expected"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_wrong_combinations(
    tmp_path: Path, rule: str, flags: str, world_size: int, flag: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(on_experts(tmp_path, flags), world_size)
    assert [p for p in caught.value.problems if p.flag == flag and expected in str(p)], str(
        caught.value
    )


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff"),
        ("--use-routing-replay", "--use-routing-replay"),
        ("--use-rollout-routing-replay", "--use-rollout-routing-replay"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size"),
        ("--recompute-granularity selective --recompute-modules moe", "--recompute-modules"),
    ],
)
def test_settings_of_experts_in_a_dense_network(tmp_path: Path, flags: str, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(complete(tmp_path, *flags.split()), 2)
    assert [
        p
        for p in caught.value.problems
        if p.flag == flag and "no effect" in str(p) and "experts" in str(p)
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-expert-capacity-factor 1.5", "drops tokens"),
        ("--moe-aux-loss-coeff 0.01", "within each micro-batch"),
    ],
)
def test_warnings(tmp_path: Path, flags: str, expected: str) -> None:
    warnings = parse_args(on_experts(tmp_path, f"{flags} --num-steps-per-rollout 2"), 1).warnings
    assert len(warnings) == 1 and expected in warnings[0]
    assert len(MOE_WARNINGS) == 2, "a new warning has a case here"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (
            f"{TP2} --sequence-parallel --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1",
            4,
        ),
        (f"{TP2} --sequence-parallel --expert-model-parallel-size 2", 4),
        (
            "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [1]*4 "
            "--moe-router-dtype fp32",
            1,
        ),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 "
            "--moe-z-loss-coeff 1e-3",
            1,
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn moe "
            "--moe-token-dispatcher-type allgather",
            1,
        ),
    ],
)
def test_what_is_right_passes(tmp_path: Path, flags: str, world_size: int) -> None:
    config = parse_args(on_experts(tmp_path, flags), world_size).megatron.transformer
    assert config.num_moe_experts == 8
    if "aux_loss seq_aux_loss" in flags:
        assert config.moe_router_load_balancing_type == [
            "aux_loss",
            "seq_aux_loss",
        ] and config.moe_aux_loss_coeff == [0.1, 0.2]


def test_modules_of_latent_attention(tmp_path: Path) -> None:
    """An adapter is of modules that the model has: no keys and values apart, and queries in one
    piece or in two."""
    words = (
        "--lora-rank 4 --lora-target-modules k_proj q_proj q_a_proj kv_a_proj_with_mqa o_proj w1"
    )
    for rank, strange in (
        (DEEPSEEK_V3["q_lora_rank"], {"k_proj", "q_proj", "w1"}),
        (None, {"k_proj", "q_a_proj", "w1"}),
    ):
        argv = complete(tmp_path, *words.split())
        (tmp_path / "hf" / "config.json").write_text(
            json.dumps({**DEEPSEEK_V3, "num_hidden_layers": 4, "q_lora_rank": rank})
        )
        assert {p.value for p in problems_of(argv) if "no such module in" in p.message} == strange


def test_context_parallel_latent_attention_of_transformer_engine_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Machine, "here", lambda: Machine(cuda=True, transformer_engine=True, gradient_fusion=False)
    )
    argv = complete(tmp_path, *["--context-parallel-size", "2"])
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**DEEPSEEK_V3, "num_hidden_layers": 4})
    )
    words = "with multi-latent attention is tested with --transformer-impl local only"
    assert any(words in warning for warning in parse_args(argv, 2).warnings)
    local = parse_args([*argv, "--transformer-impl", "local"], 2)
    assert not any(words in warning for warning in local.warnings)
