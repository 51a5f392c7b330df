"""Gradients and values of the auxiliary losses against a float64 reference, written from the papers
on transformers' model.

Token weights are 0, so that nothing but the auxiliary losses moves the weights. megatron-core
averages them over micro-batches and data-parallel ranks (algorithms.md, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.ranks import run_ranks
from tests.dist.backend_worker import random_samples
from tests.dist.float64 import EXACT
from tests.dist.test_convert_moe import make_models

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("float64")]

EP2, TP2 = (
    "--expert-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
)
KINDS = "--moe-router-load-balancing-type"
# name -> (flags, samples in a micro-batch, coefficient of each loss)
CASES: dict[str, tuple[str, int, dict[str, float]]] = {
    "EP2, aux and z": (f"{EP2} --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.3", 2, {"moe_aux_loss": 0.5, "moe_z_loss": 0.3}),
    # odd rows are padded to a multiple of 2: the padding must not count
    "TP2 EP2, aux and seq": (
        f"{TP2} {EP2} {KINDS} aux_loss seq_aux_loss --moe-aux-loss-coeff 0.5 0.25", 2, {"moe_aux_loss": 0.5, "moe_seq_aux_loss": 0.25},
    ),
    # the ranks have other numbers of tokens, since some of their rows are padding
    "TP2 EP2, z": (f"{TP2} {EP2} --moe-z-loss-coeff 0.3", 1, {"moe_z_loss": 0.3}),
    "CP2 EP2, seq and z": (
        f"--context-parallel-size 2 {EP2} {KINDS} seq_aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.3", 1,
        {"moe_seq_aux_loss": 0.5, "moe_z_loss": 0.3},
    ),
    "EP2, seq, recomputed": (
        f"{EP2} {KINDS} seq_aux_loss --moe-aux-loss-coeff 0.5 --recompute-granularity selective --recompute-modules moe",
        2, {"moe_seq_aux_loss": 0.5},
    ),
    # one row for each rank, padded to the longest; megatron-core divides by the data-parallel size
    # once more
    "EP2, global": (f"{EP2} {KINDS} global_aux_loss --moe-aux-loss-coeff 0.5 --moe-token-dispatcher-type allgather", 8, {"moe_global_aux_loss": 0.25}),
}  # fmt: skip


def balance(logits: Tensor, topk: int) -> Tensor:
    """E * sum of f_e * P_e over experts (Switch Transformer, 2101.03961), f_e counted over the topk
    choices. logits: [t, E] of one batch."""
    probs = logits.softmax(-1)
    tokens, experts = probs.shape
    total = probs.new_zeros(())
    for e in range(experts):
        chosen = sum(int(e in row) for row in probs.topk(topk).indices.tolist())
        total = total + chosen / (tokens * topk) * probs[:, e].sum() / tokens
    return experts * total


VALUES = {
    "moe_aux_loss": lambda samples, topk: balance(torch.cat(samples), topk),
    "moe_seq_aux_loss": lambda samples, topk: (
        sum(balance(logits, topk) for logits in samples) / len(samples)
    ),
    "moe_global_aux_loss": lambda samples, topk: balance(torch.cat(samples), topk),
    "moe_z_loss": lambda samples, topk: torch.cat(samples).logsumexp(-1).square().mean(),
}


def router_logits(model: Any, tokens: Tensor) -> list[Tensor]:
    """[L, E] of every layer."""
    seen: list[Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, given, out: seen.append(out[0]))
        for layer in model.model.layers
    ]
    model(tokens[None])
    for handle in handles:
        handle.remove()
    return seen


def reference(
    folder: str, per_micro_batch: int, coefficients: dict[str, float]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients by checkpoint name and values, averaged over micro-batches; values also over
    layers."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    ).eval()
    layers, topk = model.config.num_hidden_layers, model.config.num_experts_per_tok
    samples = [
        router_logits(model, s.tokens) for s in random_samples(1)
    ]  # sample -> layer -> (L, E)
    micro_batches: list[Sequence[list[Tensor]]] = [
        samples[i : i + per_micro_batch] for i in range(0, len(samples), per_micro_batch)
    ]
    total, values = torch.zeros((), dtype=torch.float64), {}
    for name, coefficient in coefficients.items():
        each = [
            VALUES[name]([sample[layer] for sample in batch], topk)
            for batch in micro_batches
            for layer in range(layers)
        ]
        total = total + coefficient * sum(each) / len(micro_batches)
        values[name] = float(sum(each).detach()) / len(each)
    total.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return revert_weight_conversion(model, grads), values


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("aux")
    model = make_models(folder, ["qwen3-moe"])["qwen3-moe"]
    cases = {
        name: f"{flags} --micro-batch-size {min(size, 4)}"
        for name, (flags, size, _) in CASES.items()
    }
    arguments = {"model": model, "cases": cases, "out": str(folder / "out.pt")}
    bias = run_ranks("tests.dist.moe_worker:balancing", 2, folder, arguments, timeout_s=240)
    assert bias[0] == bias[1]
    return model, torch.load(folder / "out.pt"), bias[0]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_values(found: tuple[str, dict[str, Any], dict[str, Any]], name: str) -> None:
    model, results, _ = found
    grads, metrics = results[name]
    expected, values = reference(model, *CASES[name][1:])
    largest = max(float(gradient.norm()) for gradient in expected.values())
    assert largest > 1e-3, "a vanishing gradient would agree with anything"
    for tensor, gradient in expected.items():
        assert float((grads[tensor] - gradient).norm()) < EXACT * largest, tensor
    for metric, value in values.items():
        assert metrics[metric] == pytest.approx(value, rel=EXACT), metric
    assert {metric for metric in metrics if metric in VALUES} == set(values)


def test_the_expert_bias_follows_the_load(
    found: tuple[str, dict[str, Any], dict[str, Any]],
) -> None:
    """2408.15664: up by the rate for an expert with less than the mean load over all ranks, down for
    one with more. Not moved by a step that
    is skipped, nor by the pass of the log-probs."""
    bias = found[2]
    tokens = sum(s.tokens.numel() for s in random_samples(1))
    for loads, moved in zip(bias["loads"], bias["biases"], strict=True):
        assert sum(loads) == 2 * tokens
        mean = sum(loads) / 4
        assert moved == pytest.approx([0.01 * ((load < mean) - (load > mean)) for load in loads])
        assert any(moved)
    assert not bias["first_skipped"] and bias["skipped"] and bias["kept"] and bias["moved"]
    assert bias["saved"] == 2
