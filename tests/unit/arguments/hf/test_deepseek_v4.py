"""DeepSeek-V4: what its config.json says, in the forms of the published files and of transformers,
what is refused, and its tables of experts by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.hf.model import read_hf_model
from arguments.parse import parse_args
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from slime_like.weights.families.deepseek_v4 import published_name
from slime_like.weights.mappings import Sizes, TokenExperts
from slime_like.yarn import Yarn
from tests.unit.command_lines import complete, problems_of

# the sizes of DeepSeek-V4-Flash, with fewer layers
COMMON: dict[str, Any] = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    **{"vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 1},
    **{"head_dim": 512, "q_lora_rank": 1024, "n_routed_experts": 256, "num_experts_per_tok": 6},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus"},
    **{"o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512},
    **{"num_nextn_predict_layers": 1, "compress_rope_theta": 160000.0, "rope_theta": 10000.0},
}
YARN = {
    **{"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
}
PUBLISHED: dict[str, Any] = {
    **COMMON,
    **{"compress_ratios": [0, 0, 4, 128, 4, 0], "num_hash_layers": 3, "qk_rope_head_dim": 64},
    **{"rope_scaling": {"type": "yarn", **YARN}, "topk_method": "noaux_tc"},
    **{"torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu"},
}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_all_forms_are_one_network(tmp_path: Path) -> None:
    from transformers import AutoConfig

    found = read_hf_model(write(tmp_path, PUBLISHED))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert read_hf_model(str(tmp_path / "saved")) == found
    flat = {"rope_type": "yarn", **YARN, "rope_theta": 10000.0}
    for rope in (flat, {**flat, "main": {"rope_theta": 7.0}}):
        config = {**PUBLISHED, "rope_scaling": None, "rope_parameters": rope}
        assert read_hf_model(write(tmp_path, config)) == found
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
        assert read_hf_model(str(tmp_path / "saved")) == found, "as transformers reads it"
    core = found.transformer
    assert core["entry_rates"] == [0, 0, 4, 128, 4] and core["entry_selection"] == [0, 0, 1, 0, 1]
    assert (core["hashed_layers"], core["hashed_tokens"]) == (3, 129280)
    assert core["entry_yarn"] == Yarn(16.0, 65536, 32.0, 1.0)
    assert (core["window_rotary_base"], core["entry_rotary_base"]) == (1e4, 16e4)
    assert (core["rotary_width"], core["window_size"]) == (64, (127, 0))
    assert (core["output_groups"], core["residual_streams"]) == (8, 4)
    assert core["moe_router_topk_scaling_factor"] == 1.5
    assert core["activation_func_clamp_value"] == 10.0
    tables = tuple(f"layers.{n}.ffn.gate.tid2eid" for n in range(3))
    assert found.untrained_prefixes == ("mtp.", *tables)


def test_what_transformers_derives(tmp_path: Path) -> None:
    """Kinds of layers, and hashed ones."""
    from transformers import AutoConfig

    plain = {k: v for k, v in PUBLISHED.items() if k not in ("compress_ratios", "num_hash_layers")}
    found = read_hf_model(write(tmp_path, {**plain, "rope_scaling": None}))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert found == read_hf_model(str(tmp_path / "saved"))
    assert found.transformer["entry_rates"] == [128, 128, 128, 4, 128]
    assert found.transformer["entry_yarn"] is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compress_ratios": [0, 4, 7, 4, 4]}, "layer_types '7': only"),
        ({"compress_ratios": [0, 4]}, "layer_types has 2 layers; it must have num_hidden_layers"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "must have a number above 1"),
        ({"compress_rates": {"full_attention": 4}}, "must have a number above 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        ({"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
        ({"o_groups": 7}, "o_groups 7 does not divide 64 heads"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
        ({"num_experts_per_tok": 1}, "the router would never learn"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "and then 'moe'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": None}}, "needs factor, a number"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.2}},
            "an attention_factor other than 1 is not supported",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7}}, "with mscale 0.7 is not"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"attention_bias": True}, "attention_bias True: attention biases are not supported"),
        ({"engram": 3}, "engram 3 is unknown and might change the network"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, {**PUBLISHED, **changes}))


def test_ranks_share_whole_groups(tmp_path: Path) -> None:
    core = read_hf_model(write(tmp_path, {**PUBLISHED, "o_groups": 2})).transformer
    sizes = ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True)
    messages = [p.message for p in layout_problems(ShardedNetwork(sizes, core, 4))]
    assert messages == ["must divide o_groups 2"]


@pytest.mark.parametrize("word", ["all-linear", "attn", "unembed", "o_proj", "mlp", "w1"])
def test_only_mlps_have_adapters(tmp_path: Path, word: str) -> None:
    argv = complete(tmp_path, "--lora-rank", "4", "--lora-target-modules", word)
    write(tmp_path / "hf", PUBLISHED)
    if word in ("mlp", "w1"):
        assert parse_args(argv, 1).lora.lora_rank == 4
        return
    message = {p.flag: p.message for p in problems_of(argv, 1)}["--lora-target-modules"]
    attention = word in ("all-linear", "attn")
    assert message.startswith("not supported with DeepSeek-V4" if attention else "no such module")
    assert message.endswith("; legal values: mlp, w1, w3, w2")


def test_predicting_layers_are_refused(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--mtp-num-layers", "1")
    write(tmp_path / "hf", PUBLISHED)
    assert "--mtp-num-layers" in {p.flag for p in problems_of(argv, 1)}


def test_tokens_are_not_dropped(tmp_path: Path) -> None:
    """Its routing has no capacity."""
    argv = complete(tmp_path)
    write(tmp_path / "hf", PUBLISHED)
    for flags in (
        ("--moe-expert-capacity-factor", "1.0"),
        ("--moe-pad-expert-input-to-capacity",),
        ("--moe-token-drop-policy", "position"),
    ):
        found = {p.flag: p.message for p in problems_of([*argv, *flags], 1)}
        assert "is not supported with DeepSeek-V4" in found[flags[0]]


def test_names_of_transformers() -> None:
    names = {
        "model.embed_tokens.weight": "embed.weight",
        "model.hc_head.hc_scale": "hc_head_scale",
        "model.layers.0.attn.norm.weight": "layers.0.attn.kv_norm.weight",
        "model.layers.1.attn.indexer.compressor.norm.weight": (
            "layers.1.attn.indexer.compressor.norm.weight"
        ),
        "model.norm.weight": "norm.weight",
        "head.weight": "head.weight",
    }
    assert {name: published_name(name) for name in names} == names
    assert {published_name(name) for name in names.values()} == set(names.values())


def test_tables_of_experts() -> None:
    sizes = Sizes(hidden=1, ffn=1, heads=1, groups=1, head_dim=1, vocab=3, experts=4, topk=2)
    table = TokenExperts("gate.tid2eid")
    right = torch.tensor([[0, 3], [1, 2], [2, 0]])
    assert table.hf_shapes(sizes) == {"gate.tid2eid": (3, 2)} and not table.problems(right, sizes)
    outside = right.clone()
    outside[1, 1] = 4
    assert table.problems(outside, sizes) == ["gate.tid2eid has expert 4 of 4 for token 1"]
    twice = right.clone()
    twice[2] = 2
    assert table.problems(twice, sizes) == ["gate.tid2eid has an expert twice for token 2: [2, 2]"]
