"""Seed-OSS and SmolLM3: the published files' config.json, and what is rejected in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from slime_like.config import ConfigError

SEED_OSS_36B: dict[str, Any] = {
    **{"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_act": "silu"},
    **{"vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648},
    **{"num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8},
    **{"head_dim": 128, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}, "torch_dtype": "bfloat16"},
    **{"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    **{"attention_dropout": 0.1, "residual_dropout": 0.1, "tie_word_embeddings": False},
}
SMOLLM3_3B: dict[str, Any] = {
    **{"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu"},
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008},
    **{"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 5e6},
    **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4},
    **{"layer_types": ["full_attention"] * 36, "use_sliding_window": False},
    **{"sliding_window": None, "attention_bias": False, "mlp_bias": False},
}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.mark.parametrize("biases", [True, False])
def test_seed_oss(tmp_path: Path, biases: bool) -> None:
    model = read_hf_model(write(tmp_path, SEED_OSS_36B, attention_bias=biases))
    assert model.transformer["add_qkv_bias"] is biases
    assert model.transformer["kv_channels"] == 128
    assert model.transformer["hidden_dropout"] == 0
    assert model.gpt["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize("changes", [{}, {"no_rope_layers": None}])
def test_smollm3(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = read_hf_model(write(tmp_path, SMOLLM3_3B, **changes))
    assert model.transformer["no_rope_freq"] == [0, 0, 0, 1] * 9
    assert not model.gpt["untie_embeddings_and_output_weights"]  # transformers' default


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (SEED_OSS_36B, {"attention_out_bias": True}, "attention_out_bias"),
        (SEED_OSS_36B, {"mlp_bias": True}, "mlp_bias"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (SMOLLM3_3B, {"no_rope_layers": [2] * 36}, "no_rope_layers"),
        (SMOLLM3_3B, {"no_rope_layers": "all"}, "no_rope_layers"),
        (SMOLLM3_3B, {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (SMOLLM3_3B, {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_rejected(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    changes = {"no_rope_layers": None, **changes} if key == "no_rope_layer_interval" else changes
    with pytest.raises(ConfigError, match=key):
        read_hf_model(write(tmp_path, config, **changes))
