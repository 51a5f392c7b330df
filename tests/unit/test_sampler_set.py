"""ops/sampler_set.py: the tokens that top-k and top-p leave, against transformers' warpers, and log-probs over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

import megatron_patches

megatron_patches.apply()

from slime_like.ops import lean_head  # noqa: E402
from slime_like.ops.lean_head import lean_log_probs  # noqa: E402
from slime_like.ops.sampler_set import sampler_floor  # noqa: E402

T, H, COLUMNS, VOCAB = 40, 6, 48, 43


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_head, "MIN_COLUMNS", 7)
    monkeypatch.setattr(lean_head, "BLOCK_ELEMENTS_CPU", 80)


def warped(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k != -1:
        scaled = TopKLogitsWarper(top_k)(None, scaled)
    return TopPLogitsWarper(top_p)(None, scaled) if top_p < 1 else scaled


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (1, 1.0), (1000, 1.0), (-1, 0.9), (-1, 0.3), (-1, 0.999), (8, 0.8)])
def test_the_sets_are_those_of_transformers_and_log_probs_are_over_them(top_k: int, top_p: float, temperature: float) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(T, H).requires_grad_(), torch.randn(COLUMNS, H).requires_grad_()
    scaled = (hidden @ weight.T)[:, :VOCAB] / temperature
    kept = warped(scaled, top_k, top_p)
    floor = sampler_floor(hidden, weight, vocab_size=VOCAB, top_k=top_k, top_p=top_p, temperature=temperature, chunk_size=9)
    assert torch.equal(scaled.detach() >= floor[:, None], kept.detach().isfinite())

    labels = torch.multinomial(kept.detach().softmax(-1), 1)[:, 0]
    log_probs, entropy = lean_log_probs(hidden, weight, labels, vocab_size=VOCAB, temperature=temperature, floor=floor, chunk_size=9)
    log_p = kept.double().log_softmax(-1)
    want_entropy = -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)
    want = log_p.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1.0, 2.0, 2 * T).view(2, -1)
    got_gradients = torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), (hidden, weight))
    want_gradients = torch.autograd.grad((weights[0] * want + weights[1] * want_entropy).sum(), (hidden, weight))
    for a, b in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_label_outside_the_set_keeps_a_probability() -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [2.0], [1.0], [0.0]])
    floor = sampler_floor(hidden, weight, vocab_size=4, top_k=2)
    log_probs, entropy = lean_log_probs(hidden, weight, torch.tensor([3]), vocab_size=4, floor=floor)
    log_p = torch.tensor([3.0, 2.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(log_probs, log_p[2:])
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum()[None])


def test_no_rows() -> None:
    assert sampler_floor(torch.ones(0, H), torch.ones(COLUMNS, H), vocab_size=VOCAB, top_k=3, top_p=0.5).shape == (0,)
