"""Step-3.5-Flash and the text of Step-3.7-Flash: the published config.json is the network that
transformers saves, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.hf.lora_modules import target_modules
from arguments.hf.model import read_hf_model
from arguments.schema import GPTModelConfig
from slime_like.config import ConfigError
from slime_like.preflight.flops import forward_flops
from slime_like.preflight.shape import shape_of
from tests.unit.arguments.hf import networks
from tests.unit.arguments.hf.networks import config_of

COMMON: dict[str, Any] = {
    **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "dtype": "bfloat16"},
    **{"vocab_size": 128896, "hidden_size": 4096, "intermediate_size": 11264},
    **{"num_hidden_layers": 45, "num_attention_heads": 64, "head_dim": 128},
    **{"moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0},
    **{"sliding_window": 512, "max_position_embeddings": 262144, "num_nextn_predict_layers": 3},
}
KINDS = [["full_attention", *["sliding_attention"] * 3][n % 4] for n in range(48)]
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072},
    **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
}
OTHER_SETTING = {
    **{"attention_type": "sliding_attention", "num_attention_heads": 96},
    **{"num_attention_groups": 8, "head_dim": 128, "true_head_dim": 128},
}
# every list has the layers that predict tokens too
PUBLISHED = {
    **{"num_attention_groups": 8, "moe_num_experts": 288, "moe_top_k": 8, "use_moe": True},
    **{"layer_types": KINDS, "attention_other_setting": OTHER_SETTING, "max_seq_len": 262144},
    **{"moe_layers_enum": ",".join(map(str, range(3, 45))), "att_impl_type": "GQA"},
    **{"rope_theta": [[5e6, 1e4][kind == "sliding_attention"] for kind in KINDS]},
    **{"partial_rotary_factors": [[0.5, 1.0][kind == "sliding_attention"] for kind in KINDS]},
    **{"rope_scaling": LLAMA3, "yarn_only_types": ["full_attention"], "use_rope_layers": []},
    **{"swiglu_limits": [*[0.0] * 43, 7, 7, 0.0, 0.0, 0.0], "norm_expert_weight": True},
    **{"swiglu_limits_shared": [*[0.0] * 43, 16, 16, 0.0, 0.0, 0.0], "use_qk_norm": True},
    **{"moe_router_activation": "sigmoid", "use_moe_router_bias": True, "need_fp32_gate": True},
    **{"use_head_wise_attn_gate": True, "zero_centered": True, "sink": False},
}
ROPE = {
    "full_attention": {**LLAMA3, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    },
}
SAVED = {
    **{"num_key_value_heads": 8, "n_routed_experts": 288, "num_experts_per_tok": 8},
    **{"layer_types": KINDS[:45], "mtp_layer_types": KINDS[45:], "rope_parameters": ROPE},
    **{"num_sliding_attention_heads": 96, "query_pre_attn_scalar": 128, "rms_norm_eps": 1e-5},
    **{"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "attention_bias": False},
    **{"swiglu_limits": [*[0.0] * 43, 7, 7], "swiglu_limits_shared": [*[None] * 43, 16.0, 16.0]},
    "per_layer_config": {
        str(n): {"num_attention_heads": 96}
        for n, kind in enumerate(KINDS[:45])
        if kind == "sliding_attention"
    },
}


def write(folder: Path, **keys: Any) -> str:
    return networks.write(folder, COMMON, **keys)


def test_both_forms_are_one_network(tmp_path: Path) -> None:
    published = read_hf_model(write(tmp_path, **PUBLISHED))
    assert published == read_hf_model(write(tmp_path, **SAVED))
    bare = {**PUBLISHED, **dict.fromkeys(("moe_layers_enum", "num_attention_groups"))}
    bare["num_key_value_heads"] = 8
    assert published == read_hf_model(write(tmp_path, **bare)), "transformers' defaults"
    found = published.transformer
    windows = [int(kind == "sliding_attention") for kind in KINDS[:45]]
    assert found["window_size"] == (511, 0) and found["window_attn_skip_freq"] == windows
    assert (found["num_attention_heads"], found["window_heads"]) == (64, 96)
    assert (found["window_rotary_base"], found["window_rotary_width"]) == (1e4, 128)
    assert (published.gpt["rotary_base"], published.gpt["rotary_percent"]) == (5e6, 0.5)
    assert (found["llama3_high_frequency"], found["llama3_original_length"]) == (32.0, 131072)
    assert found["expert_clamps"][42:] == [0, 7, 7] and found["mlp_clamps"][42:] == [0, 16, 16]
    assert found["moe_layer_freq"] == [0] * 3 + [1] * 42
    assert published.untrained_layers == 3


def test_the_text_of_a_model_that_sees(tmp_path: Path) -> None:
    text = {**{k: v for k, v in COMMON.items() if k != "architectures"}, **PUBLISHED}
    shell = {
        **{"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7"},
        **{"image_token_id": 128001, "understand_projector_stride": 2, "projector_bias": False},
        **{"text_config": text, "vision_config": {"model_type": "perception_encoder"}},
    }
    whole = read_hf_model(networks.write(tmp_path, shell))
    alone = read_hf_model(write(tmp_path, **PUBLISHED))
    assert (whole.transformer, whole.gpt) == (alone.transformer, alone.gpt)
    assert whole.untrained_prefixes == ("vision_model.", "vit_large_projector.")


def test_parameters_and_flops(tmp_path: Path) -> None:
    """196 billion, as its card says, without those that predict tokens; gates have a row for each
    head."""
    model = read_hf_model(write(tmp_path, **PUBLISHED))
    config = config_of(model)
    gpt = GPTModelConfig(**model.gpt)
    shape = shape_of(config, gpt)
    assert shape.total / 1e9 == pytest.approx(196.8, abs=1)
    full, windows = 12, 33
    flops = forward_flops(config, gpt)
    assert (flops.pair, flops.windowed) == (full * 4.0 * 64 * 128, windows * 4.0 * 96 * 128)
    assert shape.of_sizes == windows * 4096 * 32 * (2 * 128 + 1)


def test_modules_with_adapters(tmp_path: Path) -> None:
    """Also those of shared experts."""
    model = read_hf_model(write(tmp_path, **PUBLISHED))
    attention = ("k_proj", "o_proj", "q_proj", "v_proj")
    assert target_modules(["attn"], model) == attention
    assert target_modules(["mlp"], model) == ("down_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not supported"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax'"),
        ({"norm_expert_weight": False}, "norm_expert_weight False"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
        ({"use_rope_layers": [1, 0]}, "use_rope_layers"),
        ({"num_local_experts": 4}, "num_local_experts 4 is not supported; the only legal value is"),
        ({"moe_top_k": 1}, "num_experts_per_tok 1 must be from 2"),
        ({"moe_layers_enum": "3,a"}, "moe_layers_enum"),
        ({"moe_layers_enum": ""}, "leave a layer with experts"),
        ({"swiglu_limits": [0.0, 7.0]}, "swiglu_limits has 2 layers"),
        ({"swiglu_limits_shared": [-1.0] * 48}, "swiglu_limits_shared .* must not be negative"),
        ({"rope_theta": [5e6] * 47 + [1e4]}, None),  # of a layer that predicts tokens
        ({"rope_theta": [*[5e6] * 44, *[1e4] * 4]}, "rope_theta .*: layers of one kind must agree"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"partial_rotary_factors": [1.0]}, "partial_rotary_factors has 1 layers"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "must have an object for each kind of layers"),
        (
            {"attention_other_setting": {**OTHER_SETTING, "num_attention_heads": 90}},
            "does not divide the 90 heads of layers with a window",
        ),
        (
            {"attention_other_setting": {**OTHER_SETTING, "head_dim": 64}},
            "attention_other_setting with head_dim 64 is not supported",
        ),
        ({"per_layer_config": {"1": {"num_attention_heads": 80}}}, "per_layer_config"),
        ({"partial_rotary_factors": [0.5, 0.3, 0.3, 0.3] * 12}, None),
        ({"partial_rotary_factors": [0.5, 0.26, 0.26, 0.26] * 12}, "rotate an even number"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    folder = write(tmp_path, **{**PUBLISHED, **changes})
    if message is None:
        read_hf_model(folder)
        return
    with pytest.raises(ConfigError, match=message):
        read_hf_model(folder)
