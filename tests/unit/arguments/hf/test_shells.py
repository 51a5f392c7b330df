"""Config files of models with a vision tower, in the shape in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import HfModel, read_hf_model
from slime_like.config import ConfigError

SIZES: dict[str, Any] = {
    **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6},
    **{"num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 1000},
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


def read(folder: Path, **config: Any) -> HfModel:
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_model(str(folder))


def test_qwen2_5_vl_without_text_config(tmp_path: Path) -> None:
    """As transformers 4 wrote it: everything at the top."""
    model = read(
        tmp_path,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        **SIZES,
        **{"max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False},
        **{"rope_scaling": MROPE, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
        **{"image_token_id": 151655, "video_token_id": 151656, "vision_token_id": 151654},
        **{"vision_start_token_id": 151652, "vision_end_token_id": 151653},
        vision_config={"depth": 32, "model_type": "qwen2_5_vl"},
        tie_word_embeddings=False,
    )
    assert model.transformer["num_query_groups"] == 4 and model.transformer["add_qkv_bias"]
    assert model.gpt["rotary_base"] == 1e6 and not model.gpt["use_rope_scaling"]
    assert model.untrained_prefixes == ("visual.",)


def test_gemma_3_leaves_out_what_transformers_knows(tmp_path: Path) -> None:
    """The published file of the 4b model has seven keys of the text."""
    text = {
        **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        **{"model_type": "gemma3_text", "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    model = read(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=text,
        vision_config={"model_type": "siglip_vision_model"},
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144},
        **{"mm_tokens_per_image": 256, "eos_token_id": [1, 106], "initializer_range": 0.02},
    )
    assert model.gpt["vocab_size"] == 262208 and model.transformer["num_attention_heads"] == 8
    assert model.transformer["num_query_groups"] == 4 and model.transformer["kv_channels"] == 256
    assert model.gpt["max_position_embeddings"] == 131072
    assert model.gpt["rotary_seq_len_interpolation_factor"] == 8.0
    assert not model.gpt["untie_embeddings_and_output_weights"], "tied, as the published model is"
    assert model.untrained_prefixes == ("vision_tower.", "multi_modal_projector.")


def test_kimi_k2_5(tmp_path: Path) -> None:
    latent = {
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"v_head_dim": 8, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 1},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1, "topk_method": "noaux_tc"},
        **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.8},
        **{"scoring_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_theta": 50000.0},
    }  # fmt: skip
    model = read(
        tmp_path,
        architectures=["KimiK25ForConditionalGeneration"],
        model_type="kimi_k25",
        text_config={**SIZES, **latent, "num_key_value_heads": 20, "model_type": "kimi_k2"},
        vision_config={"mm_hidden_size": 1152},
        **{"media_placeholder_token_id": 163605, "ignore_index": -100, "pad_token_id": 163839},
        **{"use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video|>"},
    )
    assert model.transformer["multi_latent_attention"] and model.transformer["num_moe_experts"] == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"text_config": {**SIZES, "model_type": "ministral3"}},
            "model_type 'ministral3'.*mistral",
        ),
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {**SIZES, "model_type": "mistral", "audio": 1}}, "audio 1 is unknown"),
    ],
)
def test_other_text_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    base = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {},
    }
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, **(base | changes))


def test_the_top_level_decides_whether_weights_are_tied(tmp_path: Path) -> None:
    """transformers ties a whole model, whatever the text alone would do."""
    text = {**SIZES, "head_dim": 128, "model_type": "qwen3_vl_text", "tie_word_embeddings": True}
    for top in (True, False):
        model = read(
            tmp_path,
            architectures=["Qwen3VLForConditionalGeneration"],
            model_type="qwen3_vl",
            text_config=text,
            vision_config={},
            tie_word_embeddings=top,
        )
        assert model.gpt["untie_embeddings_and_output_weights"] is not top
