"""arguments/hf/model.py: config.json -> settings of megatron-core, against files that transformers
itself writes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.config_keys import UNSUPPORTED
from arguments.hf.model import read_hf_model
from arguments.schema import GPTModelConfig
from slime_like.config import ConfigError
from slime_like.weights.families import model_families

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
SIZES: dict[str, Any] = dict(
    vocab_size=1001,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **SIZES,
        **changes,
    }


def qwen2(**changes: Any) -> dict[str, Any]:
    return llama(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **changes)


def qwen3(**changes: Any) -> dict[str, Any]:
    return llama(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", **{"head_dim": 16, **changes}
    )


@pytest.mark.parametrize("architecture", sorted(UNSUPPORTED))
def test_what_an_unsupported_architecture_has_is_named(architecture: str, tmp_path: Path) -> None:
    """With the nearest family, which exists."""
    folder = write(tmp_path, {"architectures": [architecture], "model_type": "x"})
    missing, nearest = UNSUPPORTED[architecture]
    assert nearest in model_families.names() and architecture not in model_families.names()
    with pytest.raises(ConfigError) as raised:
        read_hf_model(folder)
    (problem,) = raised.value.problems
    assert problem.message == (
        f"config.json: {architecture} is not supported: it has {missing}; the nearest family here "
        f"is {nearest}"
    )


def write(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_llama(tmp_path: Path) -> None:
    model = read_hf_model(write(tmp_path, llama(torch_dtype="bfloat16", rope_theta=500000.0)))
    assert (model.architecture, model.model_type, model.dtype) == (
        "LlamaForCausalLM",
        "llama",
        "bfloat16",
    )
    assert model.transformer == {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 112,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "qk_layernorm": False,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    assert model.gpt == {
        "vocab_size": 1001,
        "max_position_embeddings": 4096,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rope_scaling_factor": None,
        "rotary_seq_len_interpolation_factor": None,
        "untie_embeddings_and_output_weights": True,
    }


def test_every_field_exists_where_it_is_to_go(tmp_path: Path) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = read_hf_model(write(tmp_path, qwen3()))
    assert model.transformer.keys() <= {
        field.name for field in dataclasses.fields(TransformerConfig)
    }
    assert model.gpt.keys() <= {field.name for field in dataclasses.fields(GPTModelConfig)}


def test_qwen2_has_qkv_bias_and_qwen3_normalises_queries_and_keys(tmp_path: Path) -> None:
    two = read_hf_model(write(tmp_path, qwen2(tie_word_embeddings=True)))
    assert two.transformer["add_qkv_bias"]
    assert not two.transformer["qk_layernorm"]
    assert not two.gpt["untie_embeddings_and_output_weights"]
    three = read_hf_model(write(tmp_path, qwen3(head_dim=128)))
    assert not three.transformer["add_qkv_bias"]
    assert three.transformer["qk_layernorm"]
    assert three.transformer["kv_channels"] == 128
    assert three.gpt["untie_embeddings_and_output_weights"]


def test_absent_and_null_keys_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    config = llama(num_key_value_heads=None, head_dim=None)
    del config["rms_norm_eps"], config["hidden_act"]
    model = read_hf_model(write(tmp_path, config))
    assert model.transformer["num_query_groups"] == 8
    assert model.transformer["layernorm_epsilon"] == 1e-6
    assert model.gpt["rotary_base"] == 10000.0
    assert model.dtype is None


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"
            },
        },
    ],
    ids=["transformers5", "transformers4"],
)
def test_llama3_rope(tmp_path: Path, keys: dict[str, Any]) -> None:
    gpt = read_hf_model(write(tmp_path, llama(**keys))).gpt
    assert (gpt["rotary_base"], gpt["use_rope_scaling"], gpt["rope_scaling_factor"]) == (
        500000.0,
        True,
        32.0,
    )
    assert gpt["rotary_seq_len_interpolation_factor"] is None


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_linear_rope(tmp_path: Path, type_key: str) -> None:
    gpt = read_hf_model(
        write(tmp_path, llama(rope_scaling={type_key: "linear", "factor": 4.0}))
    ).gpt
    assert gpt["rotary_seq_len_interpolation_factor"] == 4.0
    assert not gpt["use_rope_scaling"]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_reads_what_transformers_writes(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "head_dim": 16} if name == "Qwen3" else SIZES
    config = getattr(transformers, f"{name}Config")(
        **sizes, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}, dtype="bfloat16"
    )
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = read_hf_model(str(tmp_path))
    assert model.gpt["rotary_base"] == 12345.0
    assert model.transformer["num_query_groups"] == 2
    assert model.dtype == "bfloat16"
    assert model.gpt["untie_embeddings_and_output_weights"]


def test_window_keys_without_a_window_are_harmless(tmp_path: Path) -> None:
    read_hf_model(
        write(tmp_path, qwen2(use_sliding_window=False, sliding_window=4096, max_window_layers=1))
    )
    read_hf_model(
        write(tmp_path, qwen2(use_sliding_window=True, sliding_window=4096, max_window_layers=3))
    )
    read_hf_model(write(tmp_path, qwen2(layer_types=["full_attention"] * 3, use_mrope=False)))


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        (qwen2(use_sliding_window=True, sliding_window=32, max_window_layers=2), 31, [0, 0, 1]),
        (qwen2(use_sliding_window=True, sliding_window=32, max_window_layers=0), 31, None),
        (
            qwen3(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)
            | {"num_hidden_layers": 4},
            7,
            [1, 0, 1, 0],
        ),
    ],
)
def test_windows(tmp_path: Path, config: Any, window: int, layers: list[int] | None) -> None:
    """config.json's number counts the query, megatron-core's the tokens before it."""
    transformer = read_hf_model(write(tmp_path, config)).transformer
    assert transformer["window_size"] == (window, 0)
    assert transformer["window_attn_skip_freq"] == layers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            llama(architectures=["XLNetLMHeadModel"]),
            ["XLNetLMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
        ),
        (llama(architectures=None), ["architectures", "LlamaForCausalLM"]),
        (llama(model_type="mistral"), ["model_type", "mistral", "llama"]),
        (llama(attention_bias=True), ["attention_bias"]),
        (qwen3(attention_bias=True), ["attention_bias"]),
        (llama(mlp_bias=True), ["mlp_bias"]),
        (llama(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
        (llama(hidden_size=None), ["hidden_size is missing"]),
        (qwen2(num_key_value_heads=None), ["num_key_value_heads is missing"]),
        (qwen3(head_dim=None), ["head_dim is missing"]),
        (llama(num_hidden_layers=0), ["num_hidden_layers", "positive integer", "0"]),
        (llama(num_hidden_layers="3"), ["num_hidden_layers", "'3'"]),
        (llama(num_key_value_heads=3), ["num_key_value_heads 3", "8"]),
        (
            llama(num_attention_heads=7, num_key_value_heads=7),
            ["num_attention_heads 7", "hidden_size 64"],
        ),
        (llama(head_dim=7), ["head_dim 7", "odd"]),
        (llama(attention_dropout=1.5), ["attention_dropout", "1.5"]),
        (llama(torch_dtype="float8_e4m3fn"), ["float8_e4m3fn", "bfloat16"]),
        (llama(quantization_config={"bits": 4}), ["quantization_config", "unquantised"]),
        (llama(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
        (
            llama(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
            ["partial_rotary_factor", "0.25"],
        ),
        (llama(rope_theta=-1.0), ["rope_theta", "-1.0"]),
        (
            llama(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
            ["yarn", "original_max_position_embeddings"],
        ),
        (
            llama(rope_scaling={**YARN_ROPE, "attn_factor": 0.87}),
            ["yarn", "attn_factor", "0.87"],
        ),
        (
            llama(rope_scaling={"type": "dynamic", "factor": 2.0}),
            ["dynamic", "default, linear, llama3, yarn"],
        ),
        (llama(rope_scaling={"rope_type": "linear"}), ["linear", "factor"]),
        (
            llama(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 32}),
            ["beta_fast", "32"],
        ),
        (
            llama(rope_parameters={**LLAMA3_ROPE, "low_freq_factor": 4.0}),
            ["low_freq_factor 4.0", "high_freq_factor 4.0", "the high one larger"],
        ),
        (
            llama(rope_parameters={**LLAMA3_ROPE, "high_freq_factor": None}),
            ["high_freq_factor None", "must be positive"],
        ),
        (
            llama(rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 81.5}),
            ["original_max_position_embeddings 81.5", "a positive integer"],
        ),
        (
            llama(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=LLAMA3_ROPE),
            ["rope_scaling and rope_parameters differ"],
        ),
        (llama(use_sliding_window=True, sliding_window=32), ["sliding_window 32"]),
        (
            qwen3(layer_types=["full_attention", "sliding_attention", "full_attention"]),
            ["layer_types", "sliding_attention", "sliding_window None is not in use"],
        ),
        (qwen3(layer_types=["chunked_attention"] * 3), ["layer_types 'chunked_attention'"]),
        (
            qwen3(layer_types=["sliding_attention"] * 2, sliding_window=32),
            ["layer_types has 2 layers"],
        ),
        (llama(residual_multiplier=0.22), ["residual_multiplier", "0.22", "unknown"]),
        (
            llama(hidden_act=5, num_hidden_layers=-1, torch_dtype=["float32"]),
            ["hidden_act is 5: ", "num_hidden_layers is -1: ", "torch_dtype is ['float32']: "],
        ),
        (llama(layer_types=["full_attention", 1]), ["layer_types[1] is 1: "]),
        (llama(rope_scaling={"factor": math.nan}), ["rope_scaling.factor is nan: "]),
        (llama(rope_theta=True), ["rope_theta is True: "]),
        ("{not json", ["config.json cannot be read"]),
        ([1], ["must be an object"]),
    ],
    ids=lambda value: (
        " ".join(value)[:40]
        if isinstance(value, list) and value and isinstance(value[0], str)
        else ""
    ),
)
def test_refused_by_name(tmp_path: Path, config: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_model(write(tmp_path, config))
    for word in ["--hf-checkpoint", str(tmp_path), *words]:
        assert word in str(caught.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_model(
            write(
                tmp_path, llama(mlp_bias=True, hidden_act="relu", rope_scaling={"type": "dynamic"})
            )
        )
    assert len(caught.value.problems) == 3


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_hf_model(str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        read_hf_model(str(tmp_path / "absent"))
