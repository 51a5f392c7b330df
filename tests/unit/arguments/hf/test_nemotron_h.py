"""Nemotron-H and Nemotron 3: what their config.json says, in the published form and in that of
transformers 5, and which layouts Mamba-2 takes."""

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

# the sizes of Nemotron-3-Nano-30B-A3B
COMMON: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "head_dim": 128},
    **{"vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "dtype": "bfloat16"},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 262144},
    **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    **{"conv_kernel": 4, "chunk_size": 128, "expand": 2, "use_conv_bias": True, "use_bias": False},
    **{"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001},
    **{"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "n_group": 1},
    **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "topk_group": 1},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5},
    **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mamba_proj_bias": False},
    **{"mamba_ssm_cache_dtype": "float32", "residual_in_fp32": False, "attention_bias": False},
    **{"rescale_prenorm_residual": True, "use_mamba_kernels": True, "num_logits_to_keep": 1},
    **{"mlp_bias": False, "tie_word_embeddings": False, "sliding_window": None},
}
PUBLISHED: dict[str, Any] = {
    **{"hybrid_override_pattern": "ME*E-M", "num_hidden_layers": 6, "norm_eps": 1e-5},
    **{"rope_theta": 10000, "partial_rotary_factor": 1.0, "time_step_limit": [0.0, float("inf")]},
}
SAVED: dict[str, Any] = {
    "layers_block_type": [
        *("linear_attention", "moe", "full_attention", "moe", "mlp", "linear_attention")
    ],
    **{"mtp_layers_block_type": ["full_attention", "moe"], "num_nextn_predict_layers": 0},
    **{"time_step_limit": [0.0, {"__float__": "Infinity"}], "moe_shared_expert_overlap": True},
}


def write(folder: Path, **keys: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **keys}))
    return str(folder)


def test_all_forms_are_one_network(tmp_path: Path) -> None:
    published = read_hf_model(write(tmp_path, **PUBLISHED))
    older = ["mamba", "moe", "attention", "moe", "mlp", "mamba"]
    for saved in (SAVED, {**SAVED, "layers_block_type": older}):
        assert published == read_hf_model(write(tmp_path, **saved))
    found = published.transformer
    assert found["block_pattern"] == "ME*E-M" and found["num_layers"] == 6
    assert found["linear_attention_freq"] == [1, 0, 0, 0, 0, 1]
    assert found["moe_layer_freq"] == [0, 1, 0, 1, 0, 0]
    assert (found["linear_num_key_heads"], found["linear_num_value_heads"]) == (8, 64)
    assert (found["linear_key_head_dim"], found["linear_value_head_dim"]) == (128, 64)
    assert found["moe_shared_expert_intermediate_size"] == 3712
    assert (found["activation_func"], found["gated_linear_unit"]) == ("squared_relu", False)
    assert found["layernorm_epsilon"] == 1e-5 and found["mamba_smallest_step"] == 0.001
    assert published.gpt["position_embedding_type"] == "none"
    assert published.untrained_prefixes == ("mtp.",)


def test_without_experts_their_keys_say_nothing(tmp_path: Path) -> None:
    """Nemotron-H, whose file as transformers saves it has the defaults of experts."""
    changes = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    found = read_hf_model(write(tmp_path, **{**SAVED, **changes, "num_experts_per_tok": 1}))
    assert found.transformer["block_pattern"] == "M-*"
    assert "num_moe_experts" not in found.transformer


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "MEX"}, r"has unknown blocks \(X\); legal values: linear_att"),
        ({"hybrid_override_pattern": None}, "layers_block_type or hybrid_override_pattern is miss"),
        ({"num_hidden_layers": 7}, "has 6 layers for num_hidden_layers 7"),
        ({"layers_block_type": ["mamba", "swish"]}, r"has unknown blocks \(\?\)"),
        ({"layers_block_type": 3}, "layers_block_type is 3: Input should be a valid list"),
        ({"n_groups": 7}, "n_groups 7 does not divide mamba_num_heads 64"),
        ({"mamba_num_heads": None}, "mamba_num_heads is missing"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ({"use_conv_bias": False}, "use_conv_bias False is not supported"),
        ({"use_bias": True}, "use_bias True is unknown and might change the network"),
        ({"residual_in_fp32": True}, "residual_in_fp32 True is unknown"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"moe_latent_size": -1}, "moe_latent_size must be a positive integer"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, **{**PUBLISHED, **changes}))


@pytest.mark.parametrize(("tensor", "context", "legal"), [(2, 4, True), (2, 8, False)])
def test_ranks_share_whole_groups(tmp_path: Path, tensor: int, context: int, legal: bool) -> None:
    core = read_hf_model(write(tmp_path, **PUBLISHED)).transformer
    sizes = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, sequence_parallel=True
    )
    problems = layout_problems(ShardedNetwork(sizes, core, tensor * context))
    refused = f"x --context-parallel-size {context} must divide n_groups 8"
    assert [problem.message for problem in problems] == ([] if legal else [refused])


def test_modules_with_adapters(tmp_path: Path) -> None:
    """Those of attention and of MLPs, which have no gate."""
    argv = complete(tmp_path, *["--lora-rank", "4", "--lora-target-modules", "gate_proj"])
    write(tmp_path / "hf", **PUBLISHED)
    (message,) = [p.message for p in problems_of(argv, 1) if p.flag == "--lora-target-modules"]
    assert message.startswith("no such module in NemotronHForCausalLM; legal values: all-linear")
    words = message.replace(",", "").split()
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"} < set(words)
    assert not {"w1", "q_a_proj", "gate_proj"} & set(words)
