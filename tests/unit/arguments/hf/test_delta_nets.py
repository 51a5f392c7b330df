"""Networks with gated delta nets: what config.json says of them, and which layouts they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.hf.quantization import folder_quantization
from arguments.parse import parse_args
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.schema import ParallelConfig
from scripts.make_tiny_model import make_tiny_model
from slime_like.config import ConfigError
from slime_like.weights.hf_save import finish_folder
from tests.unit.command_lines import HF_CONFIG, complete, problems_of

QWEN3_NEXT: dict[str, Any] = {
    **HF_CONFIG,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}


def write(folder: Path, **changes: Any) -> str:
    (folder / "hf").mkdir(exist_ok=True)
    (folder / "hf" / "config.json").write_text(json.dumps({**QWEN3_NEXT, **changes}))
    return str(folder / "hf")


@pytest.mark.parametrize(
    ("changes", "linear"),
    [
        ({}, [1, 1, 1, 0]),
        ({"full_attention_interval": 2}, [1, 0, 1, 0]),
        ({"layer_types": ["full_attention", *["linear_attention"] * 3]}, [0, 1, 1, 1]),
    ],
)
def test_the_layers(tmp_path: Path, changes: dict[str, Any], linear: list[int]) -> None:
    model = read_hf_model(write(tmp_path, **changes))
    assert model.transformer["linear_attention_freq"] == linear
    assert model.transformer["attention_output_gate"]
    assert model.transformer["layernorm_zero_centered_gamma"]
    assert model.gpt["rotary_percent"] == 0.25


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_key_heads 2 does not divide"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"layer_types": ["linear_attention"]}, "1 entries for num_hidden_layers 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_hf_model(write(tmp_path, **changes))


def test_the_language_model_of_a_file_with_images(tmp_path: Path) -> None:
    """Keys of the whole file count where both have one; axes of images are a text's."""
    nested = {
        key: QWEN3_NEXT[key]
        for key in QWEN3_NEXT
        if key not in ("architectures", "tie_word_embeddings")
    }
    del nested["num_experts"], nested["num_experts_per_tok"]
    del nested["moe_intermediate_size"], nested["shared_expert_intermediate_size"]
    rope = {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    }
    nested |= {
        "model_type": "qwen3_5_text",
        "rope_parameters": rope,
        "rope_theta": None,
        "mtp_num_hidden_layers": 1,
    }
    full = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": nested,
        "vision_config": {"depth": 1}, "image_token_id": 3, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(full))
    model = read_hf_model(str(tmp_path))
    assert model.transformer["num_layers"] == 4 and "num_moe_experts" not in model.transformer
    assert (model.gpt["rotary_base"], model.gpt["rotary_percent"]) == (1e7, 0.5)
    assert model.gpt["untie_embeddings_and_output_weights"]
    for changes, expected in (
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": 3}, "text_config is 3: Input should be a valid dictionary"),
        (
            {"text_config": {**nested, "layer_types": "x"}},
            "layer_types is 'x': Input should be a valid list",
        ),
        ({"text_config": {**nested, "output_gate_type": "tanh"}}, "output_gate_type 'tanh'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**full, **changes}))
        with pytest.raises(ConfigError, match=expected):
            read_hf_model(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 2),
        ("--context-parallel-size 4", 4),
    ],
)
def test_ranks_share_whole_groups(tmp_path: Path, flags: str, size: int) -> None:
    argv = complete(tmp_path, *flags.split())
    write(tmp_path)
    assert any(
        f"--context-parallel-size {size} must divide linear_num_key_heads 2" in problem.message
        for problem in problems_of(argv, 4)
    )


def test_the_rest_of_a_saved_folder(tmp_path: Path) -> None:
    """Processors and own code are copied; what is nested in text_config counts too."""
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    made.mkdir()
    quantization = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    text = {"tie_word_embeddings": True, "quantization_config": quantization}
    config = {"auto_map": {"AutoConfig": "own.Config"}, "text_config": text}
    (source / "config.json").write_text(json.dumps(config))
    found = folder_quantization(str(source))
    assert found is not None and found.kind == "fp8"
    copied = {"preprocessor_config.json", "video_preprocessor_config.json", "own.py"}
    for name in copied:
        (source / name).write_text("{}")
    finish_folder(made, source, dtype="float32", untied_head=True)
    assert copied <= {path.name for path in made.iterdir()}
    saved = json.loads((made / "config.json").read_text())["text_config"]
    assert saved == {"tie_word_embeddings": False, "dtype": "float32"}


def test_converters_know_what_delta_nets_share(tmp_path: Path) -> None:
    core = read_hf_model(write(tmp_path)).transformer
    cut = ShardedNetwork(ParallelConfig(tensor_model_parallel_size=4), core, 4)
    assert any("linear_num_key_heads 2" in problem.message for problem in layout_problems(cut))


@pytest.mark.parametrize(
    ("like", "word", "legal"),
    [
        ("GptOssForCausalLM", "mlp", False),  # experts in one tensor
        ("GptOssForCausalLM", "down_proj", False),
        ("GptOssForCausalLM", "all-linear", True),
        ("GraniteMoeForCausalLM", "mlp", False),
        ("Phi3ForCausalLM", "q_proj", False),  # queries, keys and values in one matrix
        ("Phi3ForCausalLM", "attn", True),
        ("Lfm2ForCausalLM", "o_proj", False),  # it has another name
        ("Lfm2ForCausalLM", "attn", True),
    ],
)
def test_words_that_name_nothing(tmp_path: Path, like: str, word: str, legal: bool) -> None:
    """Next to another word, which names something."""
    argv = complete(tmp_path, "--lora-rank", "4", "--lora-target-modules", "unembed", word)
    make_tiny_model(like, tmp_path / "hf")
    if legal:
        assert parse_args(argv, 1).lora.lora_rank == 4
        return
    (found,) = [p for p in problems_of(argv) if p.flag == "--lora-target-modules"]
    assert found.value == word and f"no such module in {like}; legal values: " in found.message


def test_gates_that_are_one_matrix_have_no_factors(tmp_path: Path) -> None:
    """Of GLM-4, whose gate_proj and up_proj are stacked."""
    words = "--lora-rank 8 --lora-target-modules q_proj gate_proj"
    argv = complete(tmp_path, *words.split())
    glm4 = {**HF_CONFIG, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(glm4))
    assert any(
        "no such module in Glm4ForCausalLM" in problem.message for problem in problems_of(argv)
    )
