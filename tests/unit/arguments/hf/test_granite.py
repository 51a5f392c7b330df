"""Granite 4: published config.json with Mamba-2 and without, sizes by the models' cards, and what is
refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from tests.unit.arguments.hf.networks import shape, write

COMMON: dict[str, Any] = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
    **{"vocab_size": 100352, "num_hidden_layers": 40, "embedding_multiplier": 12},
    **{"residual_multiplier": 0.22, "hidden_act": "silu", "tie_word_embeddings": True},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000},
    **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 128},
    **{"mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False, "init_method": "mup"},
    **{"normalization_function": "rmsnorm", "attention_bias": False, "rope_scaling": None},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.01, "attention_dropout": 0.0},
}
MICRO = {
    **COMMON,
    **{"hidden_size": 2560, "num_attention_heads": 40, "num_key_value_heads": 8},
    **{"intermediate_size": 8192, "shared_intermediate_size": 8192, "num_local_experts": 0},
    **{"num_experts_per_tok": 0, "attention_multiplier": 0.015625, "logits_scaling": 10},
    **{"position_embedding_type": "rope", "layer_types": ["attention"] * 40},
    **{"mamba_n_heads": 128, "mamba_d_head": 40},
}
H_TINY = {
    **COMMON,
    **{"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4},
    **{"intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64},
    **{"num_experts_per_tok": 6, "attention_multiplier": 0.0078125, "logits_scaling": 6},
    **{"position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_head": 64},
    "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
}


def test_the_dense_model(tmp_path: Path) -> None:
    model = read_hf_model(write(tmp_path, MICRO))
    found = model.transformer
    assert (found["softmax_scale"], found["residual_multiplier"]) == (0.015625, 0.22)
    assert (found["embedding_multiplier"], found["logits_scaling"]) == (12.0, 10.0)
    assert "linear_attention_freq" not in found and "no_rope_freq" not in found
    assert shape(model).total / 1e9 == pytest.approx(3.4, abs=0.05)


def test_the_model_with_mamba(tmp_path: Path) -> None:
    """7 billion parameters."""
    model = read_hf_model(write(tmp_path, H_TINY))
    found = model.transformer
    assert found["linear_attention_freq"] == [int(n % 10 != 5) for n in range(40)]
    assert found["no_rope_freq"] == [1] * 40
    assert shape(model).total / 1e9 == pytest.approx(6.94, abs=0.01)
    for limit in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        saved = write(tmp_path, H_TINY, time_step_limit=limit, mamba_d_head="auto")
        assert read_hf_model(saved) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_n_groups": 2}, "mamba_n_groups 2 is not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias False is not supported"),
        ({"time_step_limit": [0.1, 1.0]}, r"time_step_limit \[0.1, 1.0\] is not supported"),
        ({"mamba_d_head": 32}, "48 of size 32 are not mamba_expand x hidden_size, 3072"),
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries for num_hidden_layers 40"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, H_TINY, **changes))


def test_mamba_with_one_group_is_not_cut(tmp_path: Path) -> None:
    core = read_hf_model(write(tmp_path, H_TINY)).transformer
    problems = layout_problems(
        ShardedNetwork(ParallelConfig(tensor_model_parallel_size=2), core, 2)
    )
    assert any("must divide mamba_n_groups 1" in problem.message for problem in problems)
