"""KL estimators: values against loops, and the facts about their expected gradients, exact over a
small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime_like.losses import KL_ESTIMATORS, kl_estimate

DELTAS = [0.0, 0.3, -0.3, 2.0, -2.0, 11.0, -11.0, 50.0, -50.0]


def scalar_value(kind: str, delta: float) -> float:
    k3 = math.exp(max(-20.0, min(20.0, -delta))) - 1 + delta
    return {
        "k1": delta,
        "k2": delta**2 / 2,
        "k3": k3,
        "low_var_kl": max(-10.0, min(10.0, k3)),
        "abs": abs(delta),
    }[kind.rstrip("+")]


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_values(kind: str) -> None:
    reference = torch.full((len(DELTAS),), -1.0, dtype=torch.float64)
    log_probs = reference + torch.tensor(DELTAS, dtype=torch.float64)
    expected = torch.tensor([scalar_value(kind, d) for d in DELTAS], dtype=torch.float64)
    torch.testing.assert_close(
        kl_estimate(kind, log_probs, reference), expected, rtol=1e-9, atol=1e-12
    )


def token_gradient(kind: str, delta: float, ratio: float | None = None) -> float:
    """d estimate / d log-prob of one token."""
    log_probs = torch.tensor([delta], dtype=torch.float64, requires_grad=True)
    log_ratio = None if ratio is None else log_probs - (delta - math.log(ratio))
    estimate = kl_estimate(
        kind, log_probs, torch.zeros(1, dtype=torch.float64), log_ratio=log_ratio
    )
    return float(torch.autograd.grad(estimate.sum(), log_probs)[0])


@pytest.mark.parametrize("delta", [0.0, 0.4, -0.4, 1.5, -1.5])
def test_gradient_of_each_token(delta: float) -> None:
    assert token_gradient("k1", delta) == 1
    assert token_gradient("k2", delta) == pytest.approx(delta)
    assert token_gradient("k3", delta) == pytest.approx(1 - math.exp(-delta))
    for kind in ("k1+", "k3+", "low_var_kl+", "abs+"):
        assert token_gradient(kind, delta) == pytest.approx(delta)
        assert token_gradient(kind, delta, ratio=1.7) == pytest.approx(1.7 * delta)
    assert token_gradient("k2", delta, ratio=1.7) == pytest.approx(1.7 * delta)
    assert token_gradient("k1", delta, ratio=1.7) == pytest.approx(1.7 * (delta + 1))
    k3 = math.exp(-delta) - 1 + delta
    assert token_gradient("k3", delta, ratio=1.7) == pytest.approx(
        1.7 * (k3 + 1 - math.exp(-delta))
    )


class Vocabulary:
    """Policy, reference and sampling policy over five tokens, with exact expectations."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.logits = torch.randn(5, generator=g, dtype=torch.float64, requires_grad=True)
        self.reference = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
        self.other = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)

    def gradient_of(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]

    def forward_kl(self) -> Tensor:
        """gradient of KL(reference || policy)."""
        return self.gradient_of(
            (self.reference.exp() * (self.reference - self.logits.log_softmax(0))).sum()
        )

    def reverse_kl(self) -> Tensor:
        """gradient of KL(policy || reference)."""
        log_probs = self.logits.log_softmax(0)
        return self.gradient_of((log_probs.exp() * (log_probs - self.reference)).sum())

    def expected(self, kind: str, *, unbiased: bool, off_policy: bool) -> Tensor:
        """Expected gradient of the estimator over tokens sampled from the old policy."""
        log_probs = self.logits.log_softmax(0)
        old = self.other if off_policy else log_probs.detach()
        estimate = kl_estimate(
            kind, log_probs, self.reference, log_ratio=log_probs - old if unbiased else None
        )
        return self.gradient_of((old.exp() * estimate).sum())


def test_expected_gradients_on_policy() -> None:
    v = Vocabulary()
    torch.testing.assert_close(
        v.expected("k1", unbiased=False, off_policy=False), torch.zeros(5, dtype=torch.float64)
    )
    for kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(
            v.expected(kind, unbiased=False, off_policy=False), v.reverse_kl()
        )
    torch.testing.assert_close(v.expected("k3", unbiased=False, off_policy=False), v.forward_kl())
    assert not torch.allclose(
        v.forward_kl(), v.reverse_kl(), atol=1e-2
    )  # else the lines above say little


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_unbiased_has_the_gradient_of_the_reverse_kl(kind: str, off_policy: bool) -> None:
    v = Vocabulary()
    torch.testing.assert_close(
        v.expected(kind, unbiased=True, off_policy=off_policy), v.reverse_kl()
    )
    if off_policy:
        assert not torch.allclose(
            v.expected(kind, unbiased=False, off_policy=True), v.reverse_kl(), atol=1e-2
        )


def test_a_large_k2_does_not_round_the_value_of_k1_plus() -> None:
    delta = torch.tensor([-1234.567])
    assert torch.equal(kl_estimate("k1+", delta, torch.zeros(1)), delta)


def test_an_unknown_estimator_names_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3, low_var_kl, abs, k1\+, k3\+"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="'k2\\+'"):
        kl_estimate("k2+", torch.zeros(1), torch.zeros(1))
