"""gpt-oss: the published config.json, and what is refused of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from slime_like.config import ConfigError
from tests.unit.arguments.hf import networks
from tests.unit.arguments.hf.networks import shape
from tests.unit.command_lines import complete, problems_of

# what both files have, in transformers 4's keys
PUBLISHED: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True},
    **{"hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088, "head_dim": 64},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4},
    **{"experts_per_token": 4, "initial_context_length": 4096, "max_position_embeddings": 131072},
    **{"sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000},
    **{"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.9, "initializer_range": 0.02},
    **{"eos_token_id": 200002, "pad_token_id": 199999, "use_cache": True},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"original_max_position_embeddings": 4096, "truncate": False},
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}
SIZES = {"20b": (24, 32), "120b": (36, 128)}  # layers, experts
# billions of parameters by the models' card (arXiv 2508.10925, table 1): all, and of a token
CARD = {"20b": (20.91, 3.61), "120b": (116.83, 5.13)}


def write(folder: Path, size: str = "20b", **changes: Any) -> str:
    layers, experts = SIZES[size]
    own = {"num_hidden_layers": layers, "num_local_experts": experts}
    own["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return networks.write(folder, PUBLISHED, **{**own, **changes})


@pytest.mark.parametrize("size", SIZES)
def test_the_published_files(tmp_path: Path, size: str) -> None:
    model = read_hf_model(write(tmp_path, size))
    found = model.transformer
    assert found["window_size"] == (127, 0)
    assert found["window_attn_skip_freq"] == [1, 0] * (SIZES[size][0] // 2)
    assert found["activation_func_clamp_value"] == 7.0 and found["glu_linear_offset"] == 1.0
    assert not found["yarn_correction_range_round_to_int"]
    assert model.gpt["rotary_base"] == 150000.0
    assert read_hf_model(write(tmp_path, size, layer_types=None)).transformer == found
    sizes = shape(model)
    assert (sizes.total / 1e9, sizes.active / 1e9) == pytest.approx(CARD[size], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ({"attention_bias": False}, "attention_bias false"),
        ({"num_experts_per_tok": 64}, "above the number of experts"),
        ({"sliding_window": None}, "sliding_window None is not in use"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, **changes))


def test_experts_with_biases_are_not_cut(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    write(tmp_path / "hf", num_hidden_layers=4, layer_types=None, vocab_size=320)
    (problem,) = problems_of(argv, 2)
    assert "--expert-tensor-parallel-size" in str(problem) and "biases" in str(problem)
