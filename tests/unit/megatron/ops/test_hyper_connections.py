"""Hyper-connections against loops over the equations, and what their backward pass keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.megatron.ops.hyper_connections import (
    mean_of_streams,
    number_of_weights,
    read_gated_streams,
    read_streams,
    sinkhorn,
    spread,
    write_gated_streams,
    write_streams,
)

TOKENS, STREAMS, HIDDEN, ITERATIONS = 5, 3, 4, 6
NORM_EPSILON, EPSILON = 1e-3, 1e-2  # large, so that each of their places shows
SETTINGS = {"norm_epsilon": NORM_EPSILON, "epsilon": EPSILON, "iterations": ITERATIONS}


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = number_of_weights(STREAMS)
    shapes = {
        "streams": (TOKENS, STREAMS, HIDDEN),
        "weight": (weights, STREAMS * HIDDEN),
        "base": (weights,),
        "scale": (3,),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def block(x: Tensor) -> Tensor:
    return torch.sin(2 * x) + 0.3


def by_loop(streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    rows = []
    n = STREAMS
    for token in streams:
        flat = token.flatten()
        score = weight @ (flat / (flat.square().mean() + NORM_EPSILON).sqrt())
        a = torch.sigmoid(score[:n] * scale[0] + base[:n]) + EPSILON
        b = 2 * torch.sigmoid(score[n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (score[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
        c = torch.stack([row.exp() / row.exp().sum() for row in c]) + EPSILON
        c = c / (c.sum(0) + EPSILON)
        for _ in range(ITERATIONS - 1):
            c = torch.stack([row / (row.sum() + EPSILON) for row in c])
            c = c / (c.sum(0) + EPSILON)
        out = block(sum(a[k] * token[k] for k in range(n)))
        rows.append(
            torch.stack([b[k] * out + sum(c[m, k] * token[m] for m in range(n)) for k in range(n)])
        )
    return torch.stack(rows)


def ours(streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    x, writing, mixing = read_streams(streams, weight, base, scale, **SETTINGS)
    return write_streams(streams, block(x), writing, mixing)


def test_the_equations_token_by_token() -> None:
    x = inputs()
    share = torch.arange(TOKENS * STREAMS * HIDDEN).double().sin().view(TOKENS, STREAMS, HIDDEN)
    found, expected = ours(**x), by_loop(**x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    gradients = torch.autograd.grad((found * share).sum(), list(x.values()))
    for own, their in zip(
        gradients, torch.autograd.grad((expected * share).sum(), list(x.values())), strict=True
    ):
        assert torch.allclose(own, their, rtol=1e-12, atol=1e-14)


def test_mixing_keeps_the_sum_of_the_streams() -> None:
    """Columns sum to 1 but for the epsilon, rows ever more nearly."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(50, STREAMS, STREAMS, generator=generator, dtype=torch.float64)
    few, many = (sinkhorn(logits, count, 1e-9) for count in (2, 40))
    for mixing in (few, many):
        assert torch.allclose(mixing.sum(-2), torch.ones(1, dtype=torch.float64), atol=1e-8)
    off = [(mixing.sum(-1) - 1).abs().max() for mixing in (few, many)]
    assert off[1] < 1e-6 < 1e-2 < off[0]


def test_equal_streams_stay_equal_where_a_block_writes_alike() -> None:
    """After `spread`, the mean of the streams is a plain residual connection."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator, dtype=torch.float64)
    streams = spread(hidden, STREAMS)
    writing = torch.ones(TOKENS, STREAMS, dtype=torch.float64)
    logits = torch.randn(TOKENS, STREAMS, STREAMS, generator=generator, dtype=torch.float64)
    mixing = sinkhorn(logits, 40, 1e-15)
    after = write_streams(streams, block(hidden), writing, mixing)
    assert torch.allclose(mean_of_streams(after), hidden + block(hidden), atol=1e-6)


def test_weights_are_computed_in_float32() -> None:
    """Of bfloat16 streams; only the results are rounded."""
    half = {name: x.detach() for name, x in inputs(torch.bfloat16).items()}
    wide = {name: x.float() for name, x in half.items()}
    for found, expected in zip(
        read_streams(**half, **SETTINGS), read_streams(**wide, **SETTINGS), strict=True
    ):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


def test_backward_keeps_no_steps_of_the_weights() -> None:
    """They are computed again."""
    x = inputs()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        read_streams(**x, **SETTINGS)
    assert sum(kept) <= sum(tensor.numel() for tensor in x.values())


RANK = 2


def gated_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    wide = STREAMS * HIDDEN
    shapes = {
        "streams": (TOKENS, STREAMS, HIDDEN),
        "norm_weight": (wide,),
        "down": (RANK, wide),
        "up": (wide, RANK),
        "inject": (STREAMS, wide),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def gated_by_loop(
    streams: Tensor, norm_weight: Tensor, down: Tensor, up: Tensor, inject: Tensor
) -> Tensor:
    rows = []
    for token in streams:
        normed = torch.stack(
            [
                x / (x.square().mean() + NORM_EPSILON).sqrt() * (1 + weight)
                for x, weight in zip(token, norm_weight.view(STREAMS, HIDDEN), strict=True)
            ]
        )
        low = down @ normed.flatten() / STREAMS
        gates = torch.sigmoid(up @ (low * torch.sigmoid(low))).view(STREAMS, HIDDEN)
        out = block((gates * normed).sum(0) / STREAMS)
        b = 2 * torch.sigmoid(inject @ normed.flatten() / STREAMS)
        rows.append(torch.stack([x + weight * out for x, weight in zip(token, b, strict=True)]))
    return torch.stack(rows)


def test_gated_ones_token_by_token() -> None:
    x = gated_inputs()
    share = torch.arange(TOKENS * STREAMS * HIDDEN).double().sin().view(TOKENS, STREAMS, HIDDEN)
    block_input, writing = read_gated_streams(*x.values(), norm_epsilon=NORM_EPSILON)
    assert writing is not None
    found = write_gated_streams(x["streams"], block(block_input), writing)
    expected = gated_by_loop(**x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    gradients = torch.autograd.grad((found * share).sum(), list(x.values()))
    for own, their in zip(
        gradients, torch.autograd.grad((expected * share).sum(), list(x.values())), strict=True
    ):
        assert torch.allclose(own, their, rtol=1e-12, atol=1e-14)


def test_the_end_of_gated_ones_only_reads() -> None:
    x = gated_inputs()
    reading = {name: x[name] for name in ("streams", "norm_weight", "down", "up")}
    block_input, _ = read_gated_streams(**x, norm_epsilon=NORM_EPSILON)
    read, writing = read_gated_streams(**reading, inject=None, norm_epsilon=NORM_EPSILON)
    assert writing is None and torch.equal(read, block_input)
