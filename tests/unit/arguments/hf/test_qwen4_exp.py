"""Qwen3.8-Flash-Next (Qwen4Exp): what its config.json says, and its memory of n-grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextNGramEmbedding,
    _build_layer_multipliers,
)

from arguments.hf.model import read_hf_model
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError

# transformers' defaults, with fewer layers
TEXT: dict[str, Any] = {
    **{"model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2048, "head_dim": 256},
    **{"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 2048, "indexer_compress_ratio": 16, "max_position_embeddings": 262144},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
}
SAVED: dict[str, Any] = {
    **{"layer_types": [*["linear_attention"] * 3, "indexed_attention"] * 2, "hc_count": 4},
    **{"hc_lowrank": 320, "norm_topk_prob": True, "ple_layer_ids": [], "ple_embed_dim": 2048},
    **{"ngram_size": 3, "heads_per_ngram": 8, "split_ngram_parts": 512, "seed": 1234},
    **{"ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128},
    **{"ple_conv_kernel_size": 4, "number_of_conv_states": 1, "hidden_act": "silu"},
}


MEMORY: dict[str, Any] = {"ple_layer_ids": [6, 2], "eos_token_id": [248046, 248044]}


def write(folder: Path, *, alone: bool = False, **keys: Any) -> str:
    kind = "CausalLM" if alone else "ConditionalGeneration"
    text = {**TEXT, **keys}
    config: dict[str, Any] = {
        **{"architectures": [f"Qwen4ExpFor{kind}"], "model_type": "qwen4_exp"},
        **{"image_token_id": 248056, "vision_config": {"depth": 27}, "dtype": "bfloat16"},
        "text_config": text,
    }
    if alone:
        config = {**text, "architectures": config["architectures"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_all_forms_are_one_network(tmp_path: Path) -> None:
    saved = read_hf_model(write(tmp_path, **SAVED))
    assert saved == read_hf_model(write(tmp_path))
    kinds = ["full_attention" if k == "indexed_attention" else k for k in SAVED["layer_types"]]
    assert saved == read_hf_model(write(tmp_path, layer_types=kinds))
    found = saved.transformer
    assert found == read_hf_model(write(tmp_path, alone=True)).transformer
    assert found["linear_attention_freq"] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert (found["residual_streams"], found["stream_rank"]) == (4, 320)
    assert (found["index_topk"], found["index_pool"], found["index_n_heads"]) == (2048, 16, 4)
    assert (found["num_moe_experts"], found["moe_router_pre_softmax"]) == (512, False)
    assert saved.gpt["rotary_percent"] == 0.25 and saved.gpt["rotary_base"] == 1e7


def test_a_memory_has_the_tables_of_transformers(tmp_path: Path) -> None:
    """Of published sizes: 640 million rows."""
    found = read_hf_model(write(tmp_path, **{**SAVED, **MEMORY}))
    memory = found.transformer["ngram_memory"]
    assert memory == read_hf_model(write(tmp_path, **MEMORY)).transformer["ngram_memory"]
    keys = {**TEXT, **SAVED, **MEMORY, "ple_layer_ids": [2, 6]}
    config = Qwen4ExpTextConfig(**keys)
    for index, layer in enumerate((1, 5)):
        with torch.device("meta"):
            theirs = Qwen4ExpTextNGramEmbedding(config, 2048, layer, index)
        assert (memory.rows(layer), memory.head_width) == tuple(theirs.ngram_embedding.weight.shape)
        assert memory.tables(layer) == theirs.head_vocab_sizes
        assert memory.offsets(layer) == theirs.head_offsets
        numbers = _build_layer_multipliers(248320, 3, index, 1234)
        assert memory.multipliers(layer) == numbers.tolist()
        assert (memory.end, memory.tokens) == (theirs.eos_token_id, 248320)


def test_the_end_of_the_text_counts(tmp_path: Path) -> None:
    """transformers' text does not see the keys beside it."""
    folder = write(tmp_path, **{**SAVED, **MEMORY})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}))
    assert read_hf_model(folder).transformer["ngram_memory"].end == 248046


def test_ranks_share_the_rows_of_a_memory(tmp_path: Path) -> None:
    changes = {**SAVED, **MEMORY, "make_ngram_vocab_size_divisible_by": 1, "hidden_size": 2056}
    changes["ple_embed_dim"] = 2048
    core = read_hf_model(write(tmp_path, **changes)).transformer
    layout = ParallelConfig(tensor_model_parallel_size=16, context_parallel_size=4)
    found = layout_problems(ShardedNetwork(layout, core, 64))
    assert [p.message for p in found if "memory" in p.message] == [
        f"must divide the {core['ngram_memory'].rows(1)} rows of the memory of n-grams of layer 1",
        "x --context-parallel-size 4 must divide hc_count 4 x --hidden-size 2056 with a memory of "
        "n-grams",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"ple_layer_ids": [2, 4]},
            r"ple_layer_ids \[2, 4\]: layers \[4\] have attention; a memory",
        ),
        ({"ple_layer_ids": [0]}, r"ple_layer_ids \[0\] must be a list of layers from 1 to 8"),
        ({"ple_layer_ids": [9]}, r"ple_layer_ids \[9\] must be a list of layers from 1 to 8"),
        ({"ple_layer_ids": [2], "eos_token_id": None}, "eos_token_id is missing, which no n-gram"),
        (
            {**MEMORY, "ple_embed_dim": 2050},
            "ple_embed_dim 2050 is not divisible by the 16 heads of",
        ),
        ({**MEMORY, "ngram_size": 1}, "ngram_size 1 must be at least 2"),
        ({**MEMORY, "heads_per_ngram": 0}, "heads_per_ngram must be a positive integer, not 0"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        ({"indexer_n_heads": None}, "indexer_n_heads is missing"),
        ({"indexer_compress_ratio": 15}, "indexer_compress_ratio 15 does not divide indexer_budg"),
        ({"hc_lowrank": 0}, "hc_lowrank must be a positive integer, not 0"),
        (
            {"output_gate_type": "tanh"},
            "output_gate_type 'tanh' is not supported; legal values: silu",
        ),
        ({"attention_bias": True}, "attention_bias True: attention biases are not supported"),
        ({"hc_kind": 1}, "hc_kind 1 is unknown and might change the network"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, **{**SAVED, **changes}))
