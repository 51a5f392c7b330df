"""Gemma 4: the published config.json is the network that transformers saves, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.hf.lora_modules import absent_modules
from arguments.hf.model import read_hf_model
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.rules.pipeline import LAYOUT
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from tests.unit.arguments.hf import networks
from tests.unit.arguments.hf.networks import shape

# 60 layers of which every sixth has no window
TEXT: dict[str, Any] = {
    **{"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "head_dim": 256},
    **{"intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
    **{"num_key_value_heads": 16, "attention_k_eq_v": True, "sliding_window": 1024},
    **{"max_position_embeddings": 262144, "hidden_activation": "gelu_pytorch_tanh"},
    **{"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6},
    **{"num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False},
    **{"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144},
    **{"attention_bias": False, "attention_dropout": 0.0, "num_experts": None},
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
KINDS = ["sliding_attention"] * 5 + ["full_attention"]
PUBLISHED = {
    **TEXT,
    **{"global_head_dim": 512, "num_global_key_value_heads": 4, "tie_word_embeddings": True},
    "layer_types": KINDS * 10,
}
# the text of E2B: the last 20 of 35 layers have the keys and values of layers 13 and 14
E2B: dict[str, Any] = {
    **TEXT,
    **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "attention_k_eq_v": False},
    **{"sliding_window": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20},
    **{"use_double_wide_mlp": True, "global_head_dim": 512, "num_global_key_value_heads": None},
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}
EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
    "moe_intermediate_size": 704,
}
SAVED = {
    **{**TEXT, "layer_types": KINDS * 10, "use_bidirectional_attention": None},
    "per_layer_config": {
        str(n): {"head_dim": 512, "num_key_value_heads": 4} for n in range(5, 60, 6)
    },
}


def write(folder: Path, text: dict[str, Any], **keys: Any) -> str:
    config = {
        **{"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"},
        **{"vision_config": {"hidden_size": 1152}, "audio_config": None, "image_token_id": 258880},
        **{"vision_soft_tokens_per_image": 280, "boi_token_id": 255999, "eoi_token_id": 258882},
        **{"dtype": "bfloat16", "text_config": text, **keys},
    }
    return networks.write(folder, config)


def test_both_forms_are_one_network(tmp_path: Path) -> None:
    published = read_hf_model(write(tmp_path, PUBLISHED))
    assert published == read_hf_model(write(tmp_path, SAVED))
    bare = {**PUBLISHED}
    for key in ("layer_types", "rope_parameters", "global_head_dim"):
        del bare[key]
    assert published == read_hf_model(write(tmp_path, bare)), "transformers' defaults"
    found = published.transformer
    assert (found["kv_channels"], found["window_channels"]) == (512, 256)
    assert (found["num_query_groups"], found["window_groups"]) == (4, 16)
    assert found["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0] * 10
    assert (found["rotary_share"], found["window_rotary_base"]) == (0.25, 10000.0)
    assert published.gpt["rotary_base"] == 1e6 and published.gpt["rotary_percent"] == 1.0
    assert (found["logit_softcap"], found["softmax_scale"]) == (30.0, 1.0)
    assert not published.gpt["untie_embeddings_and_output_weights"]


def test_parameters(tmp_path: Path) -> None:
    """30.7 billion, the text of the 31B model, as counted by hand from the file's sizes."""
    model = read_hf_model(write(tmp_path, PUBLISHED))
    mlp, norms = 3 * 21504, 4
    near = 32 * 256 * 2 + 2 * 16 * 256
    far = 32 * 512 * 2 + 4 * 512
    expected = 5376 * (262144 + 1 + 60 * (mlp + norms) + 50 * near + 10 * far)
    expected += 2 * (50 * 256 + 10 * 512)
    assert shape(model).total == expected
    assert expected / 1e9 == pytest.approx(30.7, abs=0.05)


def test_experts_beside_the_mlp(tmp_path: Path) -> None:
    """The MLP is an expert of all tokens; adapters are on it, not on the experts of one tensor."""
    found = read_hf_model(write(tmp_path, {**PUBLISHED, **EXPERTS}))
    core = found.transformer
    assert core["experts_beside_mlp"] and core["moe_layer_freq"] == 1
    assert (core["num_moe_experts"], core["moe_router_topk"]) == (128, 8)
    assert (core["moe_ffn_hidden_size"], core["moe_shared_expert_intermediate_size"]) == (
        704,
        21504,
    )
    dense = read_hf_model(write(tmp_path, PUBLISHED))
    for model in (found, dense):
        assert not {"gate_proj", "up_proj", "down_proj"} & set(absent_modules(model))
    more = shape(found).total - shape(dense).total
    assert more == 60 * (128 * (3 * 704 * 5376 + 5376 + 1) + 4 * 5376)


def test_inputs_of_layers_and_shared_keys(tmp_path: Path) -> None:
    """E2B as published: 4.6 billion parameters, of which 2.3 are no table of inputs of layers."""
    found = read_hf_model(write(tmp_path, E2B))
    core = found.transformer
    assert (core["layer_input_size"], core["shared_key_layers"]) == (256, 20)
    assert core["wide_mlps"]
    sizes = shape(found)
    near = 8 * 256 * 2 + 2 * 256
    far = 8 * 512 * 2 + 2 * 512
    by_hand = 262144 + 1 + 15 * 3 * 6144 + 20 * 3 * 12288 + 35 * 4  # embedding, MLPs, norms
    by_hand += 12 * near + 3 * far + 16 * 8 * 256 * 2 + 4 * 8 * 512 * 2  # attention
    by_hand += 35 * (3 * 256 + 1)  # inputs of layers
    table = 262144 * 35 * 256
    norms = 12 * 2 * 256 + 3 * 2 * 512 + 16 * 256 + 4 * 512 + 256
    assert sizes.total == 1536 * by_hand + norms + table
    assert (sizes.total / 1e9, sizes.active / 1e9) == (
        pytest.approx(4.63, abs=0.005),
        pytest.approx(2.28, abs=0.005),
    )


def test_keys_that_are_not_used_pass_through(tmp_path: Path) -> None:
    """Google's files have them, transformers' have not."""
    unused = read_hf_model(write(tmp_path, E2B)).untrained_prefixes
    for name in ("k_proj", "v_proj", "k_norm"):
        for layer, expected in ((14, False), (15, True), (34, True)):
            file = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            assert file.startswith(unused) == expected


@pytest.mark.parametrize(
    ("settings", "core", "refused"),
    [
        ({"pipeline_model_parallel_size": 5}, {}, True),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_last_pipeline_stage": 22}, False),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_last_pipeline_stage": 21}, True),
        ({"pipeline_model_parallel_size": 2}, {LAYOUT: "Et*3|t*10|t*22|L"}, False),
        ({"pipeline_model_parallel_size": 2}, {LAYOUT: "Et*3|t*10|t*2|t*20L"}, True),
    ],
)  # fmt: skip
def test_layers_that_share_keys_are_on_one_stage(
    tmp_path: Path, settings: dict[str, Any], core: dict[str, Any], refused: bool
) -> None:
    network = {**read_hf_model(write(tmp_path, E2B)).transformer, **core}
    found = [
        str(p) for p in layout_problems(ShardedNetwork(ParallelConfig(**settings), network, 10))
    ]
    message = (
        "must leave layers 13 to 34 on one stage: layers 15 to 34 share the keys and values of 13 "
        "and 14; use --decoder-last-pipeline-num-layers 22 or more"
    )
    assert any(message in problem for problem in found) == refused
    assert refused or not found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers 35 must be less than the 35 layers"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers 31: of each kind of layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be a positive integer, not -1"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input 7 must be vocab_size"),
        ({**EXPERTS}, "use_double_wide_mlp is not supported with enable_moe_block"),
    ],
)
def test_inputs_and_shared_keys_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, {**E2B, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "num_experts must be a positive integer, not None"),
        ({**EXPERTS, "top_k_experts": 1}, "top_k_experts 1 must be from 2 to num_experts 128"),
        ({"use_bidirectional_attention": "all"}, "only causal attention"),
        ({"num_global_key_value_heads": 5}, "5 key heads of layers without a window"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config .* is not supported"),
        ({"per_layer_config": {"5": {"sliding_window": 4}}}, "per_layer_config .* not supported"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "equally in all layers without a window"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_model(write(tmp_path, {**PUBLISHED, **changes}))


def test_inputs_of_layers_are_transformers_default(tmp_path: Path) -> None:
    text = {name: value for name, value in PUBLISHED.items() if "per_layer_input" not in name}
    assert read_hf_model(write(tmp_path, text)).transformer["layer_input_size"] == 256
    assert "layer_input_size" not in read_hf_model(write(tmp_path, PUBLISHED)).transformer
