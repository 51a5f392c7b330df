"""MiMo-V2-Flash: the published config.json is the network that transformers saves, and what is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.schema import GPTModelConfig
from slime_like.config import ConfigError
from slime_like.preflight.flops import forward_flops
from slime_like.preflight.shape import shape_of
from tests.unit.arguments.hf import networks
from tests.unit.arguments.hf.networks import config_of
from tests.unit.command_lines import complete, problems_of

COMMON: dict[str, Any] = {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"},
    **{"vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "dtype": "bfloat16"},
    **{"num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4},
    **{"head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707, "hidden_act": "silu"},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False},
    **{"max_position_embeddings": 262144, "attention_bias": False, "attention_dropout": 0.0},
}
WINDOWS = [int(n > 0 and (n + 1) % 6 != 0) for n in range(48)]
PUBLISHED = {
    **{"hybrid_layer_pattern": WINDOWS, "moe_layer_freq": [0, *[1] * 47], "rope_theta": 5000000},
    **{"layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "swa_rope_theta": 10000},
    **{"sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128},
    **{"swa_head_dim": 192, "swa_v_head_dim": 128, "swa_num_attention_heads": 64},
    **{"swa_num_key_value_heads": 8, "add_swa_attention_sink_bias": True},
    **{"add_full_attention_sink_bias": False, "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "routed_scaling_factor": None, "n_shared_experts": None},
    "hybrid_block_size": None,
}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.334}
SAVED = {
    "layer_types": [["full_attention", "sliding_attention"][window] for window in WINDOWS],
    "mlp_layer_types": ["dense", *["sparse"] * 47],
    **{"sliding_window": 129, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0},
    "rope_parameters": {
        "full_attention": {**ROPE, "rope_theta": 5000000.0},
        "sliding_attention": {**ROPE, "rope_theta": 10000.0},
    },
}


def write(folder: Path, **keys: Any) -> str:
    return networks.write(folder, COMMON, **keys)


def test_both_forms_are_one_network(tmp_path: Path) -> None:
    published = read_hf_model(write(tmp_path, **PUBLISHED))
    assert published == read_hf_model(write(tmp_path, **SAVED))
    bare = {key: SAVED[key] for key in ("rms_norm_eps", "sliding_window")}
    assert published == read_hf_model(write(tmp_path, **bare)), "transformers' defaults"
    found = published.transformer
    assert found["window_size"] == (128, 0) and found["window_attn_skip_freq"] == WINDOWS
    assert (found["num_query_groups"], found["window_groups"]) == (4, 8)
    assert (found["kv_channels"], found["value_channels"]) == (192, 128)
    assert found["softmax_type"] == "learnable" and found["sinks_of_windows"]
    assert found["window_rotary_base"] == 10000.0 and published.gpt["rotary_base"] == 5e6
    other = read_hf_model(write(tmp_path, **{**PUBLISHED, "attention_value_scale": None}))
    assert (found["value_scale"], other.transformer["value_scale"]) == (0.707, 1.0)


def test_parameters_and_flops(tmp_path: Path) -> None:
    """309 billion, as its card says; of a layer with a window twice the projections of keys."""
    model = read_hf_model(write(tmp_path, **PUBLISHED))
    config = config_of(model)
    gpt = GPTModelConfig(**model.gpt)
    shape = shape_of(config, gpt)
    assert shape.total / 1e9 == pytest.approx(309, abs=1)
    full, windows = WINDOWS.count(0), WINDOWS.count(1)
    per_pair = 2.0 * 64 * (192 + 128)
    flops = forward_flops(config, gpt)
    assert (flops.pair, flops.windowed) == (full * per_pair, windows * per_pair)
    assert shape.of_sizes == windows * (4096 * 4 * (192 + 128) + 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_v_head_dim": 64}, "swa_v_head_dim 64 is not supported"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True"),
        ({"swa_num_key_value_heads": 7}, "7 key heads of layers with a window"),
        ({"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ({"sliding_window_size": None, "sliding_window": None}, "sliding_window is missing"),
        (
            {
                "rope_theta": None,
                "rope_parameters": {
                    **SAVED["rope_parameters"],
                    "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
                },
            },
            "partial_rotary_factor .* that differs by layer",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, **{**PUBLISHED, **changes}))


def test_tensor_parallel_ranks_have_whole_key_heads(tmp_path: Path) -> None:
    flags = ("--tensor-model-parallel-size", "4", "--sequence-parallel")
    argv = complete(tmp_path, *flags, "--expert-tensor-parallel-size", "1")
    write(tmp_path / "hf", **{**PUBLISHED, "swa_num_key_value_heads": 2})
    assert any(
        "must divide the 2 key heads of layers with a sliding window" in str(problem)
        for problem in problems_of(argv, 4)
    )
