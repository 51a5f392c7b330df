"""Floating-point operations by formula, against those that torch counts in the modules; the speed
that a rollout reports; rules about traces."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import megatron_patches

megatron_patches.apply()

from megatron.core.utils import unwrap_model  # noqa: E402

from arguments.parse import parse_args  # noqa: E402
from slime_like.megatron.model import mamba  # noqa: E402
from slime_like.preflight.fake_world import world_as_rank  # noqa: E402
from slime_like.preflight.flops import TERA, ForwardFlops, forward_flops, peak_tflops  # noqa: E402
from slime_like.preflight.one_rank import build_rank  # noqa: E402
from slime_like.preflight.passes import run_micro_batch  # noqa: E402
from slime_like.preflight.shape import (  # noqa: E402
    memory_matrices,
    mixer_matrices,
    stream_matrices,
)
from slime_like.trainer.factory import make_throughput, throughput_of  # noqa: E402
from tests.unit.arguments.rules.test_pairs import REF, kto_words  # noqa: E402
from tests.unit.arguments.rules.test_pairs import words as pair_words  # noqa: E402
from tests.unit.command_lines import complete, problems_of  # noqa: E402
from tests.unit.preflight.test_check import (  # noqa: E402
    DEEPSEEK_V4,
    DELTA_NETS,
    GLM4,
    GLM5,
    KIMI,
    MINIMAX,
    MOE,
    NEMOTRON,
    QWEN4,
    tiny,
)  # fmt: skip

TOKENS = 64
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "n_group": 2,
    "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="dense"),
        pytest.param(DELTA_NETS, id="experts and delta nets"),
        pytest.param(KIMI, id="Kimi delta attention"),
        pytest.param(NEMOTRON, id="Mamba-2"),
        pytest.param(GLM5, id="residual streams"),
        pytest.param(QWEN4, id="gated streams"),
        pytest.param(DEEPSEEK_V4, id="compressed attention"),
        pytest.param(LATENT, id="latent"),
        pytest.param(MOE, marks=pytest.mark.extended, id="experts"),
        pytest.param({**LATENT, "q_lora_rank": None}, marks=pytest.mark.extended, id="whole q"),
        pytest.param(MINIMAX, marks=pytest.mark.extended, id="MiniMax"),
        pytest.param(GLM4, marks=pytest.mark.extended, id="GLM-4"),
    ],
)
def test_products_with_weights(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward through megatron-core's own modules: three times the formula. Attention
    and delta rules are not computed there, and the model ends at hidden states."""
    # Mamba-2 has no kernel, for which a pass has a stand-in
    monkeypatch.setattr(mamba, "state_space", lambda read, write, x, *_: x.float())
    config = tiny(tmp_path, changes=changes, world=1)
    with world_as_rank(config.parallel, virtual_stages=None, rank=0, world_size=1) as layout:
        built = build_rank(config.megatron, config.gpt, layout, gpu=True)
        layers = list(unwrap_model(built.chunks[0]).decoder.layers)
        with FlopCounterMode(display=False) as counter:
            run_micro_batch(built, layers, TOKENS, gpu=True)
    transformer = config.megatron.transformer
    flops = forward_flops(transformer, config.gpt)
    expected = 3 * TOKENS * flops.matrices
    if changes in (
        GLM5,
        DEEPSEEK_V4,
    ):  # in backward again, and what mixes the streams, in every layer
        mixed = 3 * 2 * 2 * 2 * 2 * 64
        expected += TOKENS * 4 * (2 * stream_matrices(transformer) + mixed)
        expected += TOKENS * 2 * mixer_matrices(transformer)
    elif changes is QWEN4:
        again = 4 * stream_matrices(transformer) + mixer_matrices(transformer)
        expected += TOKENS * 2 * (again + memory_matrices(transformer))
    assert counter.get_total_flops() == expected
    assert flops.head == 2 * 64 * 320


def test_attention_and_delta_rules(tmp_path: Path) -> None:
    """By hand: 4 layers of 4 heads of 16 numbers; a half of them delta nets; one, and two of
    Mamba-2; latent heads of 12 + 8 and 12."""
    dense = forward_flops(
        tiny(tmp_path, world=1).megatron.transformer, SimpleNamespace(vocab_size=0)
    )  # type: ignore[arg-type]
    assert (dense.pair, dense.mixing) == (4 * 4 * (2 * 16 + 2 * 16), 0)
    config = tiny(tmp_path, changes=DELTA_NETS, world=1)
    mixed = forward_flops(config.megatron.transformer, config.gpt)
    channels = 2 * 2 * 12 + 4 * 10
    assert mixed.pair == dense.pair / 2
    assert mixed.mixing == 2 * (2 * 4 * channels + 6 * 4 * 12 * 10)
    config = tiny(tmp_path, changes=NEMOTRON, world=1)
    mixed = forward_flops(config.megatron.transformer, config.gpt)
    channels = 2 * 2 * 12 + 4 * 10
    assert mixed.pair == dense.pair / 4
    assert mixed.mixing == 2 * (2 * 4 * channels + 4 * 4 * 12 * 10)
    config = tiny(tmp_path, changes=LATENT, world=1)
    assert forward_flops(config.megatron.transformer, config.gpt).pair == 4 * 4 * 2 * (12 + 8 + 12)
    config = tiny(tmp_path, changes=GLM5, world=1)
    mixed = forward_flops(config.megatron.transformer, config.gpt)
    streams = 2 * (2 * 2 + 2 * 2 + 2 * 4) * 64  # read, write and mix two streams, twice in a layer
    assert mixed.windowed == 1 * 4 * 2 * (20 + 12) and mixed.window == 512
    assert mixed.mixing == 3 * (2 * 4 * 3 * 40 + 6 * 4 * 10 * 10) + 4 * streams
    # four windows; two layers with entries of four tokens, of which a token sees 16, one of 128
    config = tiny(tmp_path, changes=DEEPSEEK_V4, world=1)
    mixed = forward_flops(config.megatron.transformer, config.gpt)
    pair = 2 * 4 * (24 + 24)
    assert (mixed.pair, mixed.windowed, mixed.window) == (0, 4 * pair, 16)
    assert (mixed.entries, mixed.selected, mixed.reach) == (pair / 128, 2 * pair / 4, 4 * 16)


def test_sequences() -> None:
    """Products grow with tokens, attention with half of the square of each sequence."""
    flops = ForwardFlops(matrices=10, mixing=1, pair=2, head=100)
    assert flops.of_sequences([3, 5]) == (80, 8 + 2 * (9 + 25) / 2)
    near = ForwardFlops(matrices=0, mixing=0, pair=0, head=0, windowed=2, window=4)
    assert near.of_sequences([3, 10]) == (0, 9 + 2 * (16 / 2 + 6 * 4))
    some = ForwardFlops(matrices=0, mixing=0, pair=0, head=0, entries=4.0, selected=2.0, reach=4)
    assert some.of_sequences([3, 10]) == (0, 4 * (9 + 100) / 2 + 9 + 2 * (16 / 2 + 6 * 4))


def test_windows(tmp_path: Path) -> None:
    """Two of four layers."""
    config = tiny(tmp_path, world=1)
    full = forward_flops(config.megatron.transformer, config.gpt)
    transformer = copy.copy(config.megatron.transformer)
    transformer.window_size, transformer.window_attn_skip_freq = (15, 0), [1, 0, 1, 0]
    cut = forward_flops(transformer, config.gpt)
    assert (cut.window, cut.windowed, cut.pair) == (16, full.pair / 2, full.pair / 2)
    assert cut.of_sequences([16]) == full.of_sequences([16])


def test_sparse_attention(tmp_path: Path) -> None:
    """Up to so many keys, all of them."""
    config = tiny(tmp_path, world=1)
    full, transformer = (
        forward_flops(config.megatron.transformer, config.gpt),
        copy.copy(config.megatron.transformer),
    )
    transformer.index_topk = 16  # type: ignore[attr-defined]
    sparse = forward_flops(transformer, config.gpt)
    assert (sparse.window, sparse.windowed, sparse.pair) == (16, full.pair, 0)
    assert sparse.of_sequences([16]) == full.of_sequences([16])


def test_a_rollout(tmp_path: Path) -> None:
    """Twice the devices: half of the speed of each. An adapter's base needs two products of
    three."""
    found = {}
    for name, more in (
        ("all", ()),
        ("adapter", ("--transformer-impl", "local", "--lora-rank", "4")),
    ):
        config = tiny(tmp_path, *more, "--device-peak-tflops", "0.5", world=1)
        speed = make_throughput(config, 2, "", log_prob_passes=2)
        seconds = {"perf/train_s": 2.0, "perf/log_probs_s": 1.0, "perf/step_s": 5.0}
        found[name] = speed.metrics([(30, 20), (10, 0)], seconds)
        flops = forward_flops(config.megatron.transformer, config.gpt)
    weights = 40 * flops.matrices + 20 * flops.head
    rest = flops.pair * (900 + 100) / 2
    trained = (3 * weights + 3 * rest) / 2 / 2 / TERA
    scored = 2 * (weights + rest) / 2 / TERA
    assert found["all"] == pytest.approx({
        "perf/actor_train_tflops": trained, "perf/actor_train_tok_per_s": 20.0,
        "perf/log_probs_tflops": scored,
        "perf/tokens_per_s_per_device": 4.0, "perf/step_tflops": (2 * trained + scored) / 5,
        "perf/mfu": trained / 0.5, "perf/step_mfu": (2 * trained + scored) / 5 / 0.5,
    }, rel=1e-12)  # fmt: skip
    saved = found["all"]["perf/actor_train_tflops"] - found["adapter"]["perf/actor_train_tflops"]
    assert saved == pytest.approx(weights / 2 / 2 / TERA, rel=1e-9)
    assert make_throughput(config, 1, "", log_prob_passes=0).metrics([], seconds) == {}


@pytest.mark.parametrize(
    ("flags", "has_reference", "passes"),
    [
        ("--num-steps-per-rollout 2", False, 1),
        ("--num-steps-per-rollout 2", True, 2),
        ("", True, 1),  # the forward pass of the only step has the old log-probs
        ("--num-steps-per-rollout 2 --use-rollout-logprobs", False, 0),
        ("dpo", True, 1),
        ("kto", True, 3),
    ],
)
def test_passes_over_the_policys_log_probs(
    tmp_path: Path, flags: str, has_reference: bool, passes: int
) -> None:
    """KTO's are of the trained answers: both of a pair by the reference, one by the policy."""
    words = {
        "dpo": lambda: pair_words(tmp_path, f"--loss-type dpo_loss {REF}"),
        "kto": lambda: kto_words(tmp_path, ""),
    }
    argv = words.get(flags, lambda: complete(tmp_path, *flags.split()))()
    backend: Any = SimpleNamespace(
        device=torch.device("cpu"),
        teacher=None,
        reference=object() if has_reference else None,
        layout=SimpleNamespace(world_size=1),
    )
    assert throughput_of(parse_args(argv, 1), backend)._passes == passes


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.4),
        ("", None),
    ],
)
def test_peaks(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


WRONG = {
    "--profile --profile-step-start 0 --profile-step-end 0": "must be >= 1",
    "--profile --profile-step-start 1 --profile-step-end 1": "must be above --profile-step-start 1",
    "--profile": "must be below --num-rollout 2",
    "--use-pytorch-profiler --profile-step-start 0 --profile-ranks 0 1": "legal ranks: 0 to 0",
    "--memory-snapshot-num-steps 3": "--record-memory-history",
    "--record-memory-history": "requires a CUDA device",
}


@pytest.mark.parametrize(("flags", "message"), WRONG.items())
def test_wrong_settings(tmp_path: Path, flags: str, message: str) -> None:
    assert any(message in str(p) for p in problems_of(complete(tmp_path, *flags.split())))
