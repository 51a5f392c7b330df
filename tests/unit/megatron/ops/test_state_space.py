"""slime_like/megatron/ops/state_space.py against a loop over tokens in float64, written from the
paper's equations, and against transformers' scan in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slime_like.megatron.ops.delta_rule import DeltaRows
from slime_like.megatron.ops.state_space import state_space
from tests.unit.megatron.ops.test_delta_rule import rows_of, with_gradients

HEADS, GROUPS, N, P = 6, 2, 5, 4


def inputs(total: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """C, B, x, step sizes, and logarithms of decays from about 1 to 1e-3."""
    g = torch.Generator().manual_seed(0)
    shapes = ((GROUPS, N), (GROUPS, N), (HEADS, P), (HEADS,), (HEADS,))
    c, b, x, step, decay = (torch.randn(total, *s, generator=g, dtype=dtype) for s in shapes)
    return [c, b, x, step.exp(), -(1.2 * decay).exp()]


def model(tensors: Sequence[Tensor], rows: DeltaRows) -> Tensor:
    read, write, x, step, log_decay = tensors
    return state_space(read, write, x, step, log_decay, rows)


def loop(c: Tensor, b: Tensor, x: Tensor, step: Tensor, log_decay: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + d_t B_t x_t^T, y_t = h_t^T C_t, for one sequence."""
    out = []
    state = [torch.zeros(N, P, dtype=x.dtype) for _ in range(HEADS)]
    for t in range(x.size(0)):
        for h in range(HEADS):
            group = h // (HEADS // GROUPS)
            new = step[t, h] * torch.outer(b[t, group], x[t, h])
            state[h] = log_decay[t, h].exp() * state[h] + new
        out.append(torch.stack([state[h].T @ c[t, h // (HEADS // GROUPS)] for h in range(HEADS)]))
    return torch.stack(out)


def split_loop(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    return torch.cat([loop(*p) for p in zip(*(x.split(list(lengths)) for x in tensors))])


@pytest.mark.parametrize("lengths", [(37,), (1, 16, 17), (5, 40, 3, 16, 33)])
def test_packed_rows_are_the_papers_loop_on_each_sequence(lengths: tuple[int, ...]) -> None:
    tensors = inputs(sum(lengths))
    ours = with_gradients(lambda x: model(x, rows_of(lengths)), tensors)
    theirs = with_gradients(lambda x: split_loop(x, lengths), tensors)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))


def test_chunks_of_any_length_give_the_same() -> None:
    lengths = (50, 7)
    tensors = inputs(sum(lengths))
    one, other = (model(tensors, rows_of(lengths, chunk)) for chunk in (64, 3))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_nothing_crosses_sequences_not_even_a_nan() -> None:
    lengths, own = (9, 20, 12), slice(9, 29)
    tensors, rows = inputs(sum(lengths)), rows_of(lengths)
    clean = model(tensors, rows)
    leaves = [x.clone() for x in tensors]
    for x in leaves:
        x[:9] = torch.nan
        x[29:] = torch.nan
        x.requires_grad_()
    out = model(leaves, rows)
    assert torch.equal(out[own], clean[own])
    for gradient in torch.autograd.grad(out[own].sum(), leaves):
        assert bool(gradient[own].isfinite().all()) and bool(gradient[own].any())


def test_the_same_bits_twice() -> None:
    lengths = (30, 5, 18)
    tensors = inputs(sum(lengths), torch.float32)
    once, twice = (with_gradients(lambda x: model(x, rows_of(lengths)), tensors) for _ in range(2))
    assert all(map(torch.equal, once, twice))


def test_strong_decay_is_exact_in_float32() -> None:
    """Of one head: exp(-G_j) of a chunk's sum G_j would overflow, and the others keep their
    state."""
    tensors = inputs(80, torch.float32)
    tensors[4][:, 0] = -80.0
    tensors[4][:, 1:] = -0.01
    found, *gradients = with_gradients(lambda x: model(x, rows_of((80,), 64)), tensors)
    exact = split_loop([x.double() for x in tensors], (80,))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max()))
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_transformers_scan() -> None:
    """Which computes in float32."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    total = 150
    c, b, x, step, _ = inputs(total, torch.float32)
    rate = -torch.rand(HEADS, generator=torch.Generator().manual_seed(1)) - 0.1
    scan = modeling.mamba2_chunk_scan
    scan = getattr(scan, "__wrapped__", scan)
    expected = scan(x[None], step[None], rate, b[None], c[None], chunk_size=32)[0]
    found = state_space(c, b, x, step, step * rate, rows_of((total,), 64))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
