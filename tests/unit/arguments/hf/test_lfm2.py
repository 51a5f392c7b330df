"""LFM2: published config.json, their sizes by the models' cards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from tests.unit.arguments.hf.networks import shape, write

SHARED: dict[str, Any] = {
    **{"hidden_size": 2048, "vocab_size": 65536, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5},
    **{"rope_theta": 1000000.0, "max_position_embeddings": 128000, "torch_dtype": "bfloat16"},
}
# LFM2-1.2B, in transformers 4's keys
DENSE: dict[str, Any] = {
    **SHARED,
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 16},
    **{"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288},
    **{"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5},
    **{"block_mlp_init_scale": 1.0, "block_out_init_scale": 1.0, "block_use_swiglu": True},
    **{"block_use_xavier_init": True, "conv_dim": 2048, "conv_dim_out": 2048},
    **{"conv_use_xavier_init": True, "num_heads": 32, "use_pos_enc": True, "theta": 1000000.0},
    **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_embedding": True},
}
# LFM2-8B-A1B
KINDS = ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]
EXPERTS: dict[str, Any] = {
    **SHARED,
    **{"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "layer_types": KINDS},
    **{"num_hidden_layers": 24, "intermediate_size": 7168, "moe_intermediate_size": 1792},
    **{"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "tie_embedding": True},
}


def test_the_dense_model(tmp_path: Path) -> None:
    model = read_hf_model(write(tmp_path, DENSE))
    found = model.transformer
    assert found["linear_attention_freq"] == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert found["ffn_hidden_size"] == 8192 and found["layernorm_epsilon"] == 1e-5
    assert not model.gpt["untie_embeddings_and_output_weights"]
    assert shape(model).total / 1e9 == pytest.approx(1.17, abs=0.005)
    whole = read_hf_model(write(tmp_path, DENSE, block_auto_adjust_ff_dim=False))
    assert whole.transformer["ffn_hidden_size"] == 12288


def test_the_model_with_experts(tmp_path: Path) -> None:
    found = shape(read_hf_model(write(tmp_path, EXPERTS)))
    assert (found.total / 1e9, found.active / 1e9) == pytest.approx((8.34, 1.56), abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias True is not supported"),
        ({"use_expert_bias": False}, "use_expert_bias False is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 must be 2 to num_experts 32"),
        ({"num_dense_layers": 24}, "num_dense_layers 24 leaves no layer with experts"),
        ({"layer_types": KINDS[1:]}, "layer_types has 23 entries for num_hidden_layers 24"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, EXPERTS, **changes))


def test_ranks_have_whole_groups_of_channels(tmp_path: Path) -> None:
    """As many as attention has heads."""
    core = read_hf_model(write(tmp_path, DENSE)).transformer
    parallel = ParallelConfig(tensor_model_parallel_size=8, context_parallel_size=8)
    problems = layout_problems(ShardedNetwork(parallel, core, 64))
    assert any("must divide num_attention_heads 32" in problem.message for problem in problems)
