"""GLM-5.3-Flash: what its config.json says, in forms of both publishers, and which layouts and adapters
it takes."""

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

# the sizes of GLM-5.3-Flash, with fewer layers
TEXT: dict[str, Any] = {
    **{"model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096},
    **{"intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 8},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1},
    **{"n_routed_experts": 288, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256},
    **{"qk_rope_head_dim": 0, "head_dim": 0, "n_group": 1, "topk_group": 1, "hidden_act": "silu"},
    **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16},
    **{"linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "hc_mult": 4},
}
# what transformers derives or has as default
SAVED: dict[str, Any] = {
    **{"layer_types": [*["linear_attention"] * 3, "indexed_attention"] * 2, "qk_head_dim": 256},
    **{"mlp_layer_types": [*["dense"] * 3, *["sparse"] * 5], "indexer_types": ["full"] * 8},
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "hc_eps": 1e-6},
    **{"hc_sinkhorn_iters": 20, "swiglu_limit": 10.0, "linear_lower_bound": -5.0},
    **{"index_kpool_always_select_tail": True, "norm_topk_prob": True, "attention_bias": False},
}
DELTA = {"head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4, "safe_gate": True}


def write(folder: Path, **keys: Any) -> str:
    config = {
        **{"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"},
        **{"image_token_id": 154854, "vision_config": {"depth": 24}, "dtype": "bfloat16"},
        **{"tie_word_embeddings": False, "text_config": {**TEXT, **keys}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_all_forms_are_one_network(tmp_path: Path) -> None:
    saved = read_hf_model(write(tmp_path, **SAVED))
    assert saved == read_hf_model(write(tmp_path))
    nested = {
        **dict.fromkeys(k for k in TEXT if k.startswith("linear_")),
        "linear_attn_config": DELTA,
    }
    assert saved == read_hf_model(write(tmp_path, **nested))
    lists = {**DELTA, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]}
    assert saved == read_hf_model(write(tmp_path, linear_attn_config=lists))
    kinds = ["full_attention" if k == "indexed_attention" else k for k in SAVED["layer_types"]]
    assert saved == read_hf_model(write(tmp_path, layer_types=kinds))
    found = saved.transformer
    assert found["linear_attention_freq"] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert found["moe_layer_freq"] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (found["qk_head_dim"], found["qk_pos_emb_head_dim"]) == (256, 0)
    assert (found["index_topk"], found["index_pool"], found["index_shared"]) == (2048, 16, None)
    assert (found["residual_streams"], found["sinkhorn_iterations"]) == (4, 20)
    assert found["layernorm_epsilon"] == found["latent_norm_epsilon"] == 1e-5
    assert found["activation_func_clamp_value"] == 10.0
    assert saved.untrained_prefixes == ("model.visual.",)


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": -3.0}, -3.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_lower_bound": None, "linear_attn_config": DELTA}, -5.0),
        ({"linear_attn_config": {**DELTA, "gate_lower_bound": -2.5}}, -2.5),
        ({"linear_attn_config": {**DELTA, "gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {**DELTA, "gate_lower_bound": None, "safe_gate": False}}, None),
    ],
)
def test_the_bound_of_decays(tmp_path: Path, keys: dict[str, Any], bound: float | None) -> None:
    """As transformers reads it: absent is not null."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    found = read_hf_model(write(tmp_path, **keys)).transformer["linear_decay_bound"]
    assert found == bound == Glm5NextTextConfig(**{**TEXT, **keys}).linear_lower_bound


def test_indexers_that_share_a_selection(tmp_path: Path) -> None:
    """What a layer with a delta net is called has no effect."""
    layers = ["linear_attention", *["indexed_attention"] * 2, *["linear_attention"] * 5]
    kinds = ["full", "full", "shared", "shared", "full", "shared", "full", "full"]
    found = read_hf_model(write(tmp_path, layer_types=layers, indexer_types=kinds)).transformer
    assert found["index_shared"] == [0, 0, 1, 0, 0, 0, 0, 0]


def test_the_layer_that_predicts_is_passed_through(tmp_path: Path) -> None:
    found = read_hf_model(write(tmp_path, num_nextn_predict_layers=1))
    assert found.untrained_prefixes == ("model.visual.", "model.language_model.layers.8.")
    assert found.prediction_layers == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False is not"),
        ({"index_kpool": 15}, "index_kpool 15 does not divide index_topk 2048"),
        ({"index_kpool": 0}, "index_kpool must be a positive integer, not 0"),
        ({"index_kpool": None}, "index_kpool is missing"),
        ({"hc_mult": None}, "hc_mult is missing"),
        ({"hc_mult": "4"}, "hc_mult must be a positive integer, not '4'"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"linear_lower_bound": 5}, "linear_lower_bound must be a negative number or null, not 5"),
        ({"linear_lower_bound": "low"}, "linear_lower_bound must be a negative number or null"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types 'sliding_attention': only"),
        ({"attention_bias": True}, "attention_bias True: attention biases are not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"hc_kind": "gated"}, "hc_kind 'gated' is unknown and might change the network"),
        (
            {"indexer_types": ["full"] * 7 + ["shared"]},
            "indexer_types has 'shared' for layer 7 of 0 to 7, and the layer before it has no",
        ),
        (
            {
                "layer_types": ["indexed_attention"] * 8,
                "indexer_types": ["full", "shared", "shared", *["full"] * 5],
            },
            "indexer_types has 'shared' for layer 2 of 0 to 7",
        ),
        ({"linear_attn_config": {**DELTA, "gate": "x"}}, "linear_attn_config gate 'x' is unknown"),
        ({"linear_attn_config": {**DELTA, "safe_gate": 3}}, "safe_gate is 3: Input should be a"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, **{**SAVED, **changes}))


@pytest.mark.parametrize(("tensor", "context", "legal"), [(8, 8, True), (8, 16, False)])
def test_ranks_share_whole_heads(tmp_path: Path, tensor: int, context: int, legal: bool) -> None:
    core = read_hf_model(write(tmp_path, **SAVED)).transformer
    sizes = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, sequence_parallel=True
    )
    problems = layout_problems(ShardedNetwork(sizes, core, tensor * context))
    messages = [problem.message for problem in problems]
    refused = f"x --context-parallel-size {context} must divide linear_num_key_heads 64"
    assert messages == ([] if legal else [refused])


def test_stages_start_with_an_indexer(tmp_path: Path) -> None:
    layers = [*["linear_attention"] * 3, *["indexed_attention"] * 2, *["linear_attention"] * 3]
    kinds = [*["full"] * 4, "shared", *["full"] * 3]
    found = read_hf_model(write(tmp_path, layer_types=layers, indexer_types=kinds)).transformer
    sizes = ParallelConfig(pipeline_model_parallel_size=2)
    (problem,) = layout_problems(ShardedNetwork(sizes, found, 2))
    assert "a stage that begins with layer 4 of 0 to 7" in problem.message


def test_modules_with_adapters(tmp_path: Path) -> None:
    """Those of delta nets, of latent attention and of experts."""
    argv = complete(tmp_path, *["--lora-rank", "4", "--lora-target-modules", "k_proj", "w1"])
    write(tmp_path / "hf", **SAVED)
    (message,) = [p.message for p in problems_of(argv, 1) if p.flag == "--lora-target-modules"]
    assert message.startswith("no such module in Glm5NextForConditionalGeneration; legal values:")
    words = message.replace(",", "").split()
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "q_a_proj"} < set(words)
    assert "w1" not in words


def test_a_fused_activation_would_not_be_clamped(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--bias-activation-fusion")
    write(tmp_path / "hf", **SAVED)
    (message,) = [p.message for p in problems_of(argv, 1) if "bias-activation" in p.flag]
    assert message == "would not clamp this model's activations (swiglu_limit 10); remove it"


def test_images_are_refused(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--multimodal-keys", '{"image": "images"}')
    write(tmp_path / "hf", **SAVED)
    assert any("without images" in p.message for p in problems_of(argv, 1))
