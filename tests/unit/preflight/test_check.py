"""A look at command lines before their jobs: sizes of real models, refusals, advice, formulas."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_patches

megatron_patches.apply()

from arguments.parse import parse_args  # noqa: E402
from arguments.run_config import RunConfig  # noqa: E402
from slime_like.config import ConfigError  # noqa: E402
from slime_like.megatron.ops.fused_linear_logprob import BLOCK_ELEMENTS_GPU  # noqa: E402
from slime_like.preflight import run_preflight  # noqa: E402
from slime_like.preflight.batches import batches_of, prompt_lengths, response_lengths  # noqa: E402
from slime_like.preflight.check import check, chosen_ranks  # noqa: E402
from slime_like.preflight.fake_world import world_as_rank  # noqa: E402
from slime_like.preflight.memory import head_bytes, micro_batches_in_flight  # noqa: E402
from slime_like.preflight.one_rank import build_rank, gradient_bytes  # noqa: E402
from slime_like.preflight.passes import run_micro_batch, run_stage  # noqa: E402
from slime_like.preflight.report import duration, json_of, text_of  # noqa: E402
from slime_like.preflight.search import MAX_CHECKED, Layout, layouts, search, with_layout  # noqa: E402
from slime_like.preflight.shape import shape_of  # noqa: E402
from tests.paths import ROOT  # noqa: E402
from tests.unit.command_lines import HF_CONFIG, complete, problems_of  # noqa: E402

BILLION = 10**9
# as the models' cards have them: parameters in all, and of one token
MODELS = {
    "qwen3_32b": (32.8, None),
    "qwen3_235b_a22b": (235.1, 22),
    "deepseek_v3": (671.0, 37),
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0], "tie_word_embeddings": False, "head_dim": 16,
}  # fmt: skip

DELTA_NETS = {
    **MOE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "shared_expert_intermediate_size": 24,
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
}  # fmt: skip


# as its published file has them
KIMI = {
    **MOE, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_key_value_heads": 4,
    **dict.fromkeys(("num_experts_per_tok", "norm_topk_prob", "mlp_only_layers", "max_position_embeddings")),
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "mla_use_nope": True,
    "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
    "model_max_length": 512, "routed_scaling_factor": 2.446, "tie_word_embeddings": False,
    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 10, "num_heads": 4, "short_conv_kernel_size": 4},
}  # fmt: skip
# a layer of each kind, and experts on a latent
NEMOTRON = {
    **MOE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "ME*M-", "num_hidden_layers": 5,
    **dict.fromkeys(("num_experts", "mlp_only_layers", "rope_theta", "rms_norm_eps", "hidden_act")),
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20, "n_groups": 2,
    "mamba_num_heads": 4, "mamba_head_dim": 10, "ssm_state_size": 12, "conv_kernel": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
# three of four layers with delta nets, two residual streams
GLM5 = {
    **MOE, "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "num_key_value_heads": 4, "head_dim": 0,
    **dict.fromkeys(("num_experts", "mlp_only_layers", "norm_topk_prob")), "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 0, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "swiglu_limit": 7.0,
    "linear_head_dim": 10, "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "hc_mult": 2, "index_kpool": 4, "index_topk": 512,
    "index_n_heads": 4, "index_head_dim": 8,
}  # fmt: skip
QWEN4 = {
    **DELTA_NETS, "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "mlp_only_layers": None, "head_dim": 16,
    "hc_count": 2, "hc_lowrank": 6, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": 512,
    "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 100, "eos_token_id": 1,
}  # fmt: skip
# a layer of each kind of attention, one of them with experts by token
DEEPSEEK_V4 = {
    **MOE, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 24,
    **dict.fromkeys(("num_experts", "mlp_only_layers", "norm_topk_prob")), "q_lora_rank": 20, "o_lora_rank": 10, "o_groups": 2,
    "n_routed_experts": 8, "qk_rope_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 16, "hc_mult": 2,
    "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1, "swiglu_limit": 7.0, "sliding_window": 16,
}  # fmt: skip
MINIMAX = {
    **MOE, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_local_experts": 4, "rotary_dim": 8,
    **dict.fromkeys(("num_experts", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers")),
}  # fmt: skip
GPT_OSS = {
    **MINIMAX, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rotary_dim": None, "sliding_window": 128,
    "attention_bias": True,
}  # fmt: skip
GEMMA3 = {
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16},
    **{"sliding_window": 128, "query_pre_attn_scalar": 16},
}
GRANITE = {
    **MOE, "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared", "num_local_experts": 4,
    **dict.fromkeys(("num_experts", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers")), "shared_intermediate_size": 24,
}  # fmt: skip
GRANITE_4 = {
    **GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "mamba_n_heads": 8, "mamba_d_state": 6,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "intermediate_size": 32,
}  # fmt: skip
# layers with and without a window, of which the former have twice as many key heads
MIMO_V2 = {
    **MOE, "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "n_routed_experts": 8, "v_head_dim": 10,
    **dict.fromkeys(("num_experts", "mlp_only_layers")), "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 0],
    "rope_parameters": {kind: {"partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")}, "rope_theta": None,
}  # fmt: skip
# half of the layers with more heads and a window; gates of heads
STEP = {
    **MOE, "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "n_routed_experts": 8, "share_expert_dim": 24,
    **dict.fromkeys(("num_experts", "mlp_only_layers", "norm_topk_prob")), "sliding_window": 128, "num_sliding_attention_heads": 8,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "rope_theta": [1e6, 1e4] * 2, "moe_layers_enum": "1,2,3",
}  # fmt: skip
GEMMA4 = {
    **GEMMA3, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "query_pre_attn_scalar": None, "global_head_dim": 24,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "rope_theta": None, "hidden_act": None,
}  # fmt: skip
GEMMA4_MOE = {
    **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip
# inputs of layers, two layers that share the keys of the first two, with wider MLPs
GEMMA4_E2B = {
    **GEMMA4, "hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LFM2 = {
    **MOE, "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "conv_L_cache": 3, "num_dense_layers": 1, "head_dim": None,
    "layer_types": ["conv", "conv", "full_attention", "conv"], "mlp_only_layers": None, "hidden_act": None, "rms_norm_eps": None,
}  # fmt: skip
GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}


def job(model: str, *more: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run file of one of the models, on 1,024 GPUs."""
    monkeypatch.chdir(ROOT)
    return ["--config", f"examples/preflight/{model}.yaml", "--preflight", "--nodes", "128", *more]


def tiny(
    folder: Path, *more: str, changes: dict[str, Any] | None = None, world: int = 8
) -> RunConfig:
    argv = [*complete(folder), "--preflight", "--world-size", str(world), *more]
    config = {**HF_CONFIG, **(changes or {})}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    return parse_args(argv, 1)


# in its own process: other tests leave megatron-core's globals and patched modules behind
LOOK = """
import json, sys
import megatron_patches
megatron_patches.apply()
from arguments.parse import parse_args
from slime_like.preflight.check import check
found = check(parse_args(sys.argv[1:], 1))
ranks = [rank.rank for rank in found.ranks]
print(json.dumps([found.fits, found.shape.total, found.shape.active, ranks, found.host_bytes]))
"""


@pytest.mark.parametrize(
    "model",
    ["qwen3_32b", *(pytest.param(m, marks=pytest.mark.extended) for m in list(MODELS)[1:])],
)
def test_models_on_1024_gpus(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit as the run files have them. Parameters of a stage's ranks add up to the model's, and
    the memory of the look is bounded."""
    command = [sys.executable, "-c", LOOK, *job(model, monkeypatch=monkeypatch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    fits, all_parameters, active_parameters, ranks, host_bytes = json.loads(
        done.stdout.splitlines()[-1]
    )
    total, active = MODELS[model]
    assert fits
    assert all_parameters / BILLION == pytest.approx(total, rel=0.005)
    assert active is None or active_parameters / BILLION == pytest.approx(active, rel=0.025)
    assert {0, 1023} <= set(ranks)
    assert host_bytes < 4 * BILLION


IMPOSSIBLE = {
    "--tensor-model-parallel-size 3": "--num-attention-heads 64",
    "--pipeline-model-parallel-size 3": "does not divide the 1024 processes",
    "--pipeline-model-parallel-size 4": "divisor of 94",
    "--expert-model-parallel-size 48": "divisor of 128",
    "--global-batch-size 64": "fewer than the 128 data-parallel ranks",
    "--no-sequence-parallel": "experts with --tensor-model-parallel-size above 1",
}


@pytest.mark.parametrize(("flags", "reason"), IMPOSSIBLE.items())
def test_impossible_layouts_are_refused(
    flags: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = job("qwen3_235b_a22b", *flags.split(), monkeypatch=monkeypatch)
    assert any(reason in str(problem) for problem in problems_of(argv))


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank, term and three flags; the exit status is 1, and JSON has the same."""
    file = tmp_path / "found.json"
    words = "--tensor-model-parallel-size 2 --preflight-memory-gb 2 --preflight-json"
    config = tiny(tmp_path, *words.split(), str(file))
    assert run_preflight(config) == 1
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "does not fit: rank 0 (stage 0) needs" in text
    assert not found["fits"] and len(found["advice"]) == 3
    assert all(flags in text for flags in found["advice"])
    assert found["ranks"][0]["peak"] == sum(found["ranks"][0]["phases"]["training"].values())


def test_the_advice_helps(tmp_path: Path) -> None:
    """Sharding the optimizer makes the rank smaller by what is sharded."""
    words = [
        "--preflight-machine",
        "here",
        "--micro-batch-size",
        "1",
        "--preflight-memory-gb",
        "0.02",
    ]
    vocabulary = {"vocab_size": 2**15}
    before = check(tiny(tmp_path, *words, changes=vocabulary))
    assert "--use-distributed-optimizer" in before.advice
    sharded = tiny(tmp_path, *words, "--use-distributed-optimizer", changes=vocabulary)
    moments = [found.heaviest.state["optimizer: moments"] for found in (before, check(sharded))]
    assert moments[1] == pytest.approx(moments[0] / 8, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, MOE, {"tie_word_embeddings": False}, DELTA_NETS, KIMI, NEMOTRON, GLM5, MINIMAX, GLM4),
        *(
            QWEN4,
            GPT_OSS,
            GEMMA3,
            GRANITE,
            GRANITE_4,
            MIMO_V2,
            STEP,
            GEMMA4,
            GEMMA4_MOE,
            GEMMA4_E2B,
            LFM2,
            DEEPSEEK_V4,
        ),
    ],
    ids=[
        "dense, tied",
        "experts",
        "dense, untied",
        "delta nets",
        "Kimi delta attention",
        "Mamba-2",
        "residual streams",
        "MiniMax-M2",
        "GLM-4",
        "gated streams",
        "gpt-oss",
        "Gemma 3",
        "Granite",
        "Granite 4",
        "MiMo-V2",
        "Step-3.5",
        "Gemma 4",
        "Gemma 4 with experts",
        "Gemma 4 E2B",
        "LFM2",
        "DeepSeek-V4",
    ],
)
def test_formula_of_parameters(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Equal to megatron-core's modules, whole; 320 tokens are padded to 384."""
    config = tiny(tmp_path, changes=changes, world=1)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        real = sum(parameter.numel() for parameter in built.parameters)
    shape = shape_of(config.megatron.transformer, config.gpt)
    inputs = 4 * getattr(config.megatron.transformer, "layer_input_size", 0)
    assert shape.total + (384 - 320) * (64 * (1 if shape.tied else 2) + inputs) == real


def test_parameters_of_nemotron_3_nano(tmp_path: Path) -> None:
    """As published: 31.6 billion, of which a token passes 3.2 behind its embedding."""
    changes = {
        **NEMOTRON, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
        "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "head_dim": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "moe_latent_size": None,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    }  # fmt: skip
    config = tiny(tmp_path, changes=changes, world=1)
    shape = shape_of(config.megatron.transformer, config.gpt)
    assert shape.total / BILLION == pytest.approx(31.6, abs=0.05)
    assert shape.active / BILLION == pytest.approx(3.2, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [(DELTA_NETS, 2), (KIMI, 3), (NEMOTRON, 2), (LFM2, 3)],
    ids=["gated", "Kimi delta attention", "Mamba-2", "short convolutions"],
)
def test_a_micro_batch_through_delta_nets(
    tmp_path: Path, changes: dict[str, Any], layers: int
) -> None:
    """So many layers exchange whole sequences with the other context-parallel rank, there and back,
    in both passes. Their kernels keep less than the rule in plain torch; Mamba-2 and short
    convolutions have none."""
    config = tiny(tmp_path, "--context-parallel-size", "2", changes=changes, world=2)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=2) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        kernels, plain = (run_stage(built, 256, gpu=gpu) for gpu in (True, False))
    assert plain.traffic["alltoall_base", "context"].calls == layers * 4
    assert plain.traffic["alltoall_base", "context"] == kernels.traffic["alltoall_base", "context"]
    assert kernels.kept < plain.kept or changes in (NEMOTRON, LFM2)


def test_a_micro_batch_through_memories(tmp_path: Path) -> None:
    """Two memories of n-grams exchange their rows for whole sequences of some channels, there and
    back, in both passes: so many numbers, and delta nets theirs."""
    changes = {**QWEN4, "linear_num_key_heads": 4, "linear_value_head_dim": 8}
    words = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    config = tiny(tmp_path, *words.split(), changes=changes, world=4)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=4) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        traffic = run_stage(built, 256, gpu=True).traffic
    memories = delta_nets = 2
    assert traffic["alltoall_base", "tensor"].calls == memories * 4
    assert traffic["alltoall_base", "context"].calls == (memories + delta_nets) * 4


@pytest.mark.parametrize(
    ("changes", "gpu"),
    [
        ({**GLM5, "index_topk": 16}, True),
        ({**GLM5, "index_topk": 16}, False),
        ({**QWEN4, "indexer_budget": 16}, True),
        (DEEPSEEK_V4, True),
        (DEEPSEEK_V4, False),
    ],
)
def test_residual_streams_in_memory(tmp_path: Path, changes: dict[str, Any], gpu: bool) -> None:
    """With everything recomputed, a micro-batch keeps a layer's input: two streams more for each
    two, and no step of their weights. Queries select keys."""
    kept = {}
    for streams in (2, 4):
        changes = {**changes, "hc_count" if "hc_count" in changes else "hc_mult": streams}
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        config = tiny(tmp_path, *flags.split(), changes=changes, world=1)
        with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1) as layout:
            built = build_rank(config.megatron, config.gpt, layout, gpu=gpu)
            kept[streams] = run_stage(built, 256, gpu=gpu).kept
    hidden = 256 * 64 * config.megatron.transformer.params_dtype.itemsize
    inputs = 4 if "index_kpool" in changes else 5  # of four layers, and of what is at the end
    assert kept[4] - kept[2] == 2 * hidden * inputs


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [(GEMMA4, 2), (MIMO_V2, 2), (GEMMA4_E2B, 4)],
    ids=["Gemma 4", "MiMo-V2-Flash", "Gemma 4 E2B"],
)
def test_layers_with_and_without_a_window_in_memory(
    tmp_path: Path, changes: dict[str, Any], kinds: int
) -> None:
    """Their attention has other sizes: what all of them keep follows from one of each kind."""
    config = tiny(tmp_path, changes={**changes, "head_dim": 16}, world=1)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        found = run_stage(built, 256, gpu=True)
        layers = list(built.chunks[0].decoder.layers)
        assert len({layer.self_attention.sizes for layer in layers}) == kinds
        expected = run_micro_batch(built, layers, 256, gpu=True)
    assert found.kept == expected.kept


def test_formula_of_parameters_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of 1,024: attention is whole there but for tensor parallelism."""
    config = parse_args(job("deepseek_v3", monkeypatch=monkeypatch), 1)
    attention = shape_of(config.megatron.transformer, config.gpt).attention
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1024) as layout:
        layer = (
            build_rank(config.megatron, config.gpt, layout, gpu=True).chunks[0].decoder.layers[5]
        )
    names = ("self_attention", "input_layernorm", "pre_mlp_layernorm")
    full = ("layernorm",)  # not split over tensor-parallel ranks
    real = sum(
        parameter.numel() * (1 if any(word in name for word in full) else 8)
        for name, parameter in layer.named_parameters()
        if name.startswith(names)
    )
    assert real == attention


def stage(rank: int, stages: int, chunks: int) -> Any:
    return SimpleNamespace(pp_rank=rank, pp_size=stages, vp_size=chunks)


def test_micro_batches_in_flight() -> None:
    """By running the schedules: forward passes that are not undone by a backward pass."""
    assert [micro_batches_in_flight(stage(r, 4, 1), 8) for r in range(4)] == [4, 3, 2, 1]
    assert micro_batches_in_flight(stage(0, 4, 1), 2) == 2
    # of 2 chunks each: 2 * 3 + 4 + 1 halves on the first stage, 4 + 1 on the last
    assert micro_batches_in_flight(stage(0, 4, 2), 8) == 5.5
    assert micro_batches_in_flight(stage(3, 4, 2), 8) == 2.5


@pytest.mark.parametrize("words", ["lognormal", "lognormal:0:1", "lognormal:5:x", "gauss:1:2"])
def test_distributions_that_are_not_known(tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match="legal values: uniform, full, lognormal"):
        batches_of(tiny(tmp_path, "--preflight-lengths", words))


def test_lengths_and_micro_batches(tmp_path: Path) -> None:
    """As many as the token budget takes: 16 samples on 2 ranks, 128 tokens and a prompt of 1 each,
    3 to a budget of 400."""
    import numpy as np

    words = "--preflight-lengths full --use-dynamic-batch-size --max-tokens-per-gpu 400"
    found = batches_of(tiny(tmp_path, *words.split(), world=2))
    assert (found.number, found.samples, found.longest) == (3, 16, 129)
    assert found.used == pytest.approx(16 * 129 / (2 * 3 * 400))
    config = tiny(tmp_path, "--preflight-lengths", "lognormal:40:0.5")
    drawn = response_lengths(config, 4000, np.random.default_rng(1))
    assert abs(math.log(float(np.median(drawn)) / 40)) < 0.1 and drawn.max() <= 128


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_found_as_the_run_finds_them(tmp_path: Path, kind: str) -> None:
    """A path with an @, a range, a key of nested objects; blank lines, and rows that are skipped."""
    file = tmp_path / f"rows@2.{kind}"
    rows = [{"x": {"prompt": "a" * n}, "label": "1"} for n in (40, 80)]
    if kind == "jsonl":
        lines = [json.dumps(row).encode() for row in rows]
        file.write_bytes(b"\xef\xbb\xbf" + b"\n\n \n\xff\n{bad\n".join([*lines, b""]))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        far = pa.array([0, 10**15, 0]).cast(pa.timestamp("s"))  # of the second row: no datetime
        columns = {name: [row[name] for row in (rows[0], *rows)] for name in rows[0]}
        pq.write_table(pa.table({**columns, "time": far}), file)
    words = ("--prompt-data", f"{file}@[0:2]", "--input-key", "x.prompt", "--skip-bad-rows", "9")
    lengths, source = prompt_lengths(tiny(tmp_path, *words))
    assert lengths.tolist() == [10, 20] and str(file) in source


def test_servers_that_do_not_fit_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--rollout-engine sglang --colocate --rollout-num-gpus-per-engine 3"
    assert run_preflight(tiny(tmp_path, *words.split(), world=12)) == 2
    assert "--rollout-num-gpus-per-engine 3 do not fit" in capsys.readouterr().err


def test_a_budget_below_the_longest_sample_says_what_holds_it(tmp_path: Path) -> None:
    words = ["--use-dynamic-batch-size", "--rollout-max-response-len", "100"]
    words += ["--preflight-lengths", "full", "--max-tokens-per-gpu"]
    text = text_of(check(tiny(tmp_path, *words, "50")))
    match = re.search(r"\(the longest samples exceed it: --max-tokens-per-gpu (\d+) holds", text)
    assert match is not None, text
    assert "exceed it" not in text_of(check(tiny(tmp_path, *words, match[1])))


def test_time_and_cost_of_the_training(tmp_path: Path) -> None:
    """The price is of a GPU, the time of the job; sampling is not in it."""
    words = ("--num-steps-per-rollout", "2", "--num-rollout", "100")
    free = check(tiny(tmp_path, *words, world=2))
    assert free.optimizer_steps == 200 and free.cost_of(3600) is None
    assert "\ntraining: 200 optimizer steps in" in text_of(free) and "cost at" not in text_of(free)
    paid = check(tiny(tmp_path, *words, "--gpu-hour-price", "2.5", world=2))
    seconds = free.flops / 2 / (0.4 * 989.4e12)
    assert paid.step_s == pytest.approx(seconds, rel=0.01)
    assert paid.cost_of(7200) == pytest.approx(2.5 * 2 * 2)
    assert json_of(paid)["training_cost"] == pytest.approx(2.5 * 2 * 200 * seconds / 3600, rel=0.01)
    line = next(line for line in text_of(paid).splitlines() if line.startswith("cost"))
    assert line.startswith("cost at 2.5 a GPU hour, 2 GPUs: ") and "5 for each hour" in line
    argv = complete(tmp_path, "--num-epoch", "1", "--preflight", without=("--num-rollout",))
    epochs = check(parse_args(argv, 1))
    assert epochs.training_s is None and "\ntraining:" not in text_of(epochs)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *((0.2, "less than 1 s"), (42.4, "42 s"), (59.7, "1 min"), (90, "1 min 30 s")),
        *((11_100, "3 h 5 min"), (3600, "1 h"), (3605, "1 h"), (187_200, "2 d 4 h")),
    ],
)
def test_durations_as_people_say_them(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_gradient_buffers_count_once(tmp_path: Path) -> None:
    """They exist before a pass, which adds to them in place: a model of many weights and few rows
    needs less for its pass than for its gradients."""
    config = tiny(tmp_path, changes={"hidden_size": 256, "intermediate_size": 1024}, world=1)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        passes = run_stage(built, 1, gpu=True)
    largest = max(parameter.nbytes for parameter in built.parameters)
    assert passes.peak < 3 * largest < gradient_bytes(built)


def test_chosen_ranks(tmp_path: Path) -> None:
    words: Sequence[str] = ("--pipeline-model-parallel-size", "4", "--micro-batch-size", "1")
    config = tiny(tmp_path, *words, world=16)
    assert chosen_ranks(config) == [0, 4, 15]
    config = tiny(tmp_path, *words, "--preflight-all-ranks", world=16)
    assert chosen_ranks(config) == [0, 4, 8, 12, 15]


def test_head_has_no_logits(tmp_path: Path) -> None:
    """Twice the vocabulary adds rows of the weight's gradient, and nothing for each token."""
    small = tiny(tmp_path, changes={"vocab_size": 2**16})
    large = tiny(tmp_path, changes={"vocab_size": 2**17})
    more = head_bytes(large, 4096, gpu=True) - head_bytes(small, 4096, gpu=True)
    assert more == 2**16 * 64 * 4


def test_a_cap_of_logits_needs_a_block_in_the_head(tmp_path: Path) -> None:
    """Of its slope, in fp32."""
    plain, capped = (
        tiny(tmp_path, changes={**GEMMA4, "vocab_size": 2**16, "final_logit_softcapping": cap})
        for cap in (None, 30.0)
    )
    more = head_bytes(capped, 4096, gpu=True) - head_bytes(plain, 4096, gpu=True)
    assert more == 4 * BLOCK_ELEMENTS_GPU


def test_a_budget_that_changes_nothing_is_no_advice(tmp_path: Path) -> None:
    """The largest micro-batch is a sample, of 129 tokens at most."""
    words = "--preflight-memory-gb 0.001 --use-dynamic-batch-size --max-tokens-per-gpu"
    advice = check(tiny(tmp_path, *words.split(), "129")).advice
    assert advice and not any("--max-tokens-per-gpu" in flags for flags in advice)
    advice = check(tiny(tmp_path, *words.split(), "999")).advice
    assert any("--max-tokens-per-gpu" in flags for flags in advice)


def test_search_names_layouts_that_the_rules_take(tmp_path: Path) -> None:
    """Its flags replace those of the command line, whichever way they were spelled."""
    config = tiny(tmp_path, "--pipeline-model-parallel-size=2", world=8)
    planned = with_layout(config, Layout(tensor=2, pipeline=1, context=2, expert=None))
    assert planned is not None
    sizes = planned.parallel
    assert (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size) == (2, 1)
    assert sizes.context_parallel_size == 2 and planned.parallel.sequence_parallel
    assert with_layout(config, Layout(tensor=8, pipeline=1, context=1, expert=None)) is None


def test_search_prints_the_flags_that_it_checked(tmp_path: Path) -> None:
    """They are appended to the command line of the run, which may have sequence parallelism."""
    words = "--tensor-model-parallel-size 2 --sequence-parallel"
    config = tiny(tmp_path, *words.split(), world=8)
    layout = Layout(tensor=1, pipeline=2, context=1, expert=None)
    planned, printed = with_layout(config, layout), parse_args([*config.argv, *layout.flags], 8)
    assert planned is not None and planned.parallel == printed.parallel
    assert not printed.parallel.sequence_parallel


@pytest.mark.parametrize("needed", [64, 65])
def test_search_goes_on_until_a_layout_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    """Those that fit may be slower than all that are otherwise examined; that none does is known
    from those that divide the model the most."""
    examined: list[int] = []

    def shared_by_enough(config: RunConfig) -> SimpleNamespace:
        sizes = config.parallel
        ranks = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
        examined.append(ranks * sizes.context_parallel_size)
        return SimpleNamespace(fits=examined[-1] >= needed, bubble=0.0)

    monkeypatch.setattr("slime_like.preflight.search.check", shared_by_enough)
    config = tiny(tmp_path, "--rollout-batch-size", "16", world=64)
    found = search(config)
    assert examined[0] < 64
    if needed == 64:
        sizes = [each.layout.tensor * each.layout.pipeline * each.layout.context for each in found]
        assert sizes and min(sizes) >= needed
        assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    else:
        assert found == [] and len(examined) < 2 * MAX_CHECKED < len(list(layouts(config)))


@pytest.mark.slow
def test_search_ranks_by_its_model(tmp_path: Path) -> None:
    best = search(tiny(tmp_path, "--bf16", "--use-distributed-optimizer", world=4))
    assert len(best) == 5
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert all(each.preflight.fits for each in best)


def test_preflight_settings_need_it(tmp_path: Path) -> None:
    assert any("--preflight" in p.message for p in problems_of(complete(tmp_path, "--nodes", "2")))


@pytest.mark.extended
def test_frozen_parameters_have_neither_gradients_nor_moments(tmp_path: Path) -> None:
    """--only-train-params-name-list of one of four layers, on a job of one rank."""
    code = (
        "import json, sys, megatron_patches\nmegatron_patches.apply()\n"
        "from arguments.parse import parse_args\nfrom slime_like.preflight.check import check\n"
        "print(json.dumps([dict(rank.state) for rank in check(parse_args(sys.argv[1:], 1)).ranks]))"
    )
    argv = [*complete(tmp_path), "--preflight", "--world-size", "1"]
    states = []
    for more in ([], ["--only-train-params-name-list", r"layers\.2\."]):
        command = [sys.executable, "-c", code, *argv, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        (state,) = json.loads(done.stdout.splitlines()[-1])
        states.append(state)
    full, part = states
    assert part["weights"] == full["weights"]
    for name in ("gradients", "optimizer: moments"):
        assert 0.1 * full[name] < part[name] < 0.25 * full[name]


@pytest.mark.parametrize(
    ("words", "line", "ranks"),
    [
        (["--colocate"], "servers: 4 of 1 GPUs, on all 4 GPUs of the trainer (--colocate)", [0, 3]),
        (["--colocate", "--rollout-num-gpus", "2"],
         "servers: 2 of 1 GPUs, on 2 of the 4 GPUs of the trainer (--colocate)", [0]),
        (["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"],
         "servers: 2 of 2 GPUs, on 4 further GPUs: 8 in all", []),
        (["--rollout-external-engine-addrs", "127.0.0.1:1"], None, []),
    ],
)  # fmt: skip
def test_where_servers_are(
    tmp_path: Path, words: list[str], line: str | None, ranks: list[int]
) -> None:
    """Memory of servers is counted on the ranks whose GPUs they share, and nowhere else."""
    engine = ["--rollout-engine", "sglang", "--preflight", "--world-size", "4"]
    found = check(parse_args(complete(tmp_path, *engine, *words), 1))
    lines = text_of(found).splitlines()
    assert [text for text in lines if text.startswith("servers:")] == ([line] if line else [])
    assert [rank.rank for rank in found.ranks] == [0, 3]
    assert [rank.rank for rank in found.ranks if "generation" in rank.phases] == ranks
    few = [text for text in found.config.warnings if "leave it out for servers on all" in text]
    assert len(few) == (ranks == [0])


@pytest.mark.parametrize(("transport", "buckets"), [("broadcast", 3), ("tensor", 3), ("disk", 2)])
def test_buckets_of_a_weight_update(tmp_path: Path, transport: str, buckets: int) -> None:
    """One, its shards, and one that is being sent meanwhile."""
    words = (
        "--rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:1 --preflight "
        f"--update-weight-transport {transport} --update-weight-buffer-size 1000000"
    )
    (rank,) = check(parse_args(complete(tmp_path, *words.split()), 1)).ranks
    assert rank.phases["weight update"]["messages with weights"] == buckets * 1_000_000


def test_more_servers_than_the_trainer_has_gpus(tmp_path: Path) -> None:
    words = "--rollout-engine sglang --colocate --rollout-num-gpus 8 --preflight --world-size 4"
    (found,) = problems_of(complete(tmp_path, *words.split()), 1)
    assert found.flag == "--rollout-num-gpus" and "of which there are 4" in found.message


def test_gpus_of_servers_have_their_price(tmp_path: Path) -> None:
    words = "--rollout-engine sglang --preflight --world-size 4 --gpu-hour-price 2"
    for servers, gpus in (("--colocate", 4), ("--rollout-num-gpus 4", 8)):
        found = check(parse_args(complete(tmp_path, *words.split(), *servers.split()), 1))
        assert found.cost_of(3600.0) == 2 * gpus
        assert f"a GPU hour, {gpus} GPUs:" in text_of(found)
