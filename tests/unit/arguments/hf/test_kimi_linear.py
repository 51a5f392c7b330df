"""Kimi-Linear: what its config.json says, in the published form and in that of transformers 5, and
which layouts its delta nets take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from tests.unit.command_lines import complete, problems_of

COMMON: dict[str, Any] = {
    **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "head_dim": 72},
    **{"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "dtype": "bfloat16"},
    **{"num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "topk_group": 1},
    **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1},
    **{"moe_intermediate_size": 1024, "moe_renormalize": True, "num_expert_group": 1},
    **{"model_max_length": 1048576, "tie_word_embeddings": False},
}
LAYERS = {
    **{"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]},
    **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
}
PUBLISHED = {
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
    **{"use_grouped_topk": True, "topk_method": "noaux_tc", "mla_use_nope": True},
    **{"rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0},
    "linear_attn_config": LAYERS,
}
SAVED = {
    **{"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention"] * 2
    + ["full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
}


def write(folder: Path, **keys: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**COMMON, **keys}))
    return str(folder)


def test_both_forms_are_one_network(tmp_path: Path) -> None:
    published = read_hf_model(write(tmp_path, **PUBLISHED))
    assert published == read_hf_model(write(tmp_path, **SAVED))
    found = published.transformer
    assert found["linear_attention_freq"] == [1, 1, 0, 1, 0]
    assert found["moe_layer_freq"] == [0, 1, 1, 1, 1]
    assert found["linear_num_key_heads"] == found["linear_num_value_heads"] == 32
    assert found["linear_key_head_dim"] == found["linear_value_head_dim"] == 128
    assert (found["num_moe_experts"], found["moe_router_topk"]) == (256, 8)
    assert found["latent_unrotated"] and found["linear_decay_per_channel"]
    assert published.gpt["max_position_embeddings"] == 1048576


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False is not supported"),
        ({"moe_renormalize": False}, "moe_renormalize False is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"num_experts": None}, "num_experts is missing"),
        (
            {"linear_attn_config": {**LAYERS, "kda_layers": [1, 2]}},
            "linear_attn_config must have each of the layers 1 to 5 once",
        ),
        (
            {"linear_attn_config": {**LAYERS, "kda_layers": "all"}},
            "kda_layers is 'all': Input should be a valid list",
        ),
        ({"linear_attn_config": None}, "linear_num_heads must be a positive integer, not None"),
        ({"linear_attn_config": {"num_heads": 32, "head_dim": 8}}, "layer_types is missing"),
        ({"linear_attn_config": {**LAYERS, "gate": "x"}}, "linear_attn_config gate 'x'"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, **{**PUBLISHED, **changes}))


@pytest.mark.parametrize(("tensor", "context", "legal"), [(4, 4, True), (8, 8, False)])
def test_ranks_share_whole_heads(tmp_path: Path, tensor: int, context: int, legal: bool) -> None:
    core = read_hf_model(write(tmp_path, **PUBLISHED)).transformer
    sizes = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, sequence_parallel=True
    )
    problems = layout_problems(ShardedNetwork(sizes, core, tensor * context))
    messages = [problem.message for problem in problems]
    refused = f"x --context-parallel-size {context} must divide linear_num_key_heads 32"
    assert messages == ([] if legal else [refused])


def test_modules_with_adapters(tmp_path: Path) -> None:
    """Those of delta nets and of experts, but no compressed queries."""
    argv = complete(
        tmp_path, *["--lora-rank", "4", "--lora-target-modules", "k_proj", "w1", "q_a_proj"]
    )
    write(tmp_path / "hf", **PUBLISHED)
    (message,) = [p.message for p in problems_of(argv, 1) if p.flag == "--lora-target-modules"]
    assert message.startswith("no such module in KimiLinearForCausalLM; legal values: all-linear")
    words = message.replace(",", "").split()
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "w1"} < set(words)
    assert "q_a_proj" not in words
