"""Cross-entropy with another distribution, from hidden states, against autograd through the logits in
float64."""

from __future__ import annotations

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from slime_like.megatron.ops import fused_linear_logprob  # noqa: E402
from slime_like.megatron.ops.soft_cross_entropy import soft_cross_entropy  # noqa: E402

T, H, V = 9, 6, 20


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [2, -1])
@pytest.mark.parametrize("rows", [[8, 0, 3, 5], []])
def test_values_and_gradients_in_float64(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], chunk_size: int, temperature: float
) -> None:
    """Several blocks, the last narrower; columns that are padding have no part in it."""
    monkeypatch.setattr(fused_linear_logprob, "MIN_COLUMNS", 3)
    monkeypatch.setattr(fused_linear_logprob, "BLOCK_ELEMENTS_CPU", 14)
    torch.manual_seed(0)
    hidden = (3 * torch.randn(T, H, dtype=torch.float64)).requires_grad_()
    targets = 3 * torch.randn(len(rows), H, dtype=torch.float64)
    weight = torch.randn(V + 2, H, dtype=torch.float64, requires_grad=True)
    chosen, scale = torch.tensor(rows, dtype=torch.int64), torch.randn(len(rows)).double()
    found = soft_cross_entropy(
        hidden,
        targets,
        weight,
        vocab_size=V,
        rows=chosen,
        temperature=temperature,
        chunk_size=chunk_size,
    )
    head = weight.detach()[:V]
    log_p = (hidden[chosen] @ head.T / temperature).log_softmax(-1)
    wanted = -((targets @ head.T / temperature).softmax(-1) * log_p).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((scale * x).sum(), [hidden]) for x in (found, wanted))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-11, atol=1e-12)


def test_narrow_states_give_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    weight, rows = torch.randn(V, H, dtype=torch.bfloat16), torch.arange(T)
    found = soft_cross_entropy(hidden, hidden.detach(), weight, vocab_size=V, rows=rows)
    found.sum().backward()
    assert found.dtype == torch.float32 and hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16 and not hidden.grad.any(), "p is q: the least value"
    logits = (hidden.detach().float() @ weight.float().T).bfloat16().float()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found.detach(), entropy, rtol=2e-2, atol=2e-2)
