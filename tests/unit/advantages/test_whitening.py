"""Whitened advantages against numpy's formula."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.advantages import (
    whiten,
)
from tests.unit.advantages.token_cases import NAN, samples


def test_whitening() -> None:
    masks, kl = samples(3)
    values = [
        torch.where(m, 1e4 + k, NAN) for m, k in zip(masks, kl)
    ]  # far from 0: one pass in float32 would lose the variance
    got = whiten(values, masks)
    active = [float(x) for k, m in zip(kl, masks) for x in k[m]]
    mean = sum(active) / len(active)
    variance = sum((x - mean) ** 2 for x in active) / (len(active) - 1)
    for result, k, mask in zip(got, kl, masks):
        expected = [
            (float(x) - mean) / math.sqrt(variance + 1e-8) if m else 0.0
            for x, m in zip(k, mask.tolist())
        ]
        assert result.tolist() == pytest.approx(expected, rel=1e-6)


def test_whitening_of_equal_values_of_one_token_and_of_none() -> None:
    assert whiten([torch.tensor([3.0, 3.0, 3.0])], [torch.tensor([True, True, False])])[
        0
    ].tolist() == [0, 0, 0]
    assert whiten([torch.tensor([7.0, 9.0])], [torch.tensor([True, False])])[0].tolist() == [0, 0]
    assert whiten([torch.tensor([7.0])], [torch.tensor([False])])[0].tolist() == [0]
