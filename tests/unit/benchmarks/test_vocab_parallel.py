"""Log-prob and entropy of one rank's logits, against autograd through log_softmax in float64.
Several ranks: tests/dist."""

import pytest
import torch

from benchmarks.vocab_parallel import vocab_parallel_log_probs


def reference(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits[:, :vocab_size].double() / temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, labels[:, None])[:, 0], -torch.where(p > 0, p * log_p, 0.0).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_values_and_gradients(temperature: float, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(17, 64)).requires_grad_()
    labels = torch.randint(vocab_size, (17,))
    weights = torch.randn(2, 17)
    log_probs, entropy = vocab_parallel_log_probs(
        logits, labels, vocab_size=vocab_size, temperature=temperature
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    exact = logits.detach().double().requires_grad_()
    want_log_probs, want_entropy = reference(exact, labels, vocab_size, temperature)
    (weights[0] * want_log_probs + weights[1] * want_entropy).sum().backward()
    torch.testing.assert_close(log_probs.double(), want_log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert (logits.grad[:, vocab_size:] == 0).all()


def test_banned_tokens_leave_everything_finite() -> None:
    logits = torch.randn(5, 32)
    logits[:, 7:20] = float("-inf")
    logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.full((5,), 3), vocab_size=32)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([1]), vocab_size=3)
    assert log_probs.item() == -1e4
    assert entropy.item() == 0.0


def test_input_is_not_changed() -> None:
    logits = torch.randn(4, 8)
    before = logits.clone()
    vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.int64), vocab_size=6)
    assert torch.equal(logits, before)
