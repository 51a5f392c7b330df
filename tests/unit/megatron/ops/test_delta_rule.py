"""slime_like/megatron/ops/delta_rule.py against a loop over tokens in float64, written from the
papers' equations, and against transformers' chunked rules: with a decay per head, and with one per
channel of the key."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slime_like.megatron.ops.delta_rule import DeltaRows, causal_conv, delta_rows, delta_rule

HEADS, GROUPS, DK, DV = 4, 2, 8, 6
PER_HEAD, PER_CHANNEL = (HEADS,), (HEADS, DK)
both = pytest.mark.parametrize("decays", [PER_HEAD, PER_CHANNEL], ids=["head", "channel"])


def rows_of(lengths: Sequence[int], chunk: int = 16) -> DeltaRows:
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return delta_rows(cu, lengths, chunk)


def inputs(
    total: int,
    decays: tuple[int, ...] = PER_HEAD,
    groups: int = GROUPS,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Query, key, value, logarithms of decays from about 1 to 1e-3, rates."""
    g = torch.Generator().manual_seed(0)
    shapes = ((groups, DK), (groups, DK), (HEADS, DV), decays, (HEADS,))
    q, k, v, decay, rate = (torch.randn(total, *s, generator=g, dtype=dtype) for s in shapes)
    return [q, k, v, -(1.2 * decay).exp(), rate.sigmoid()]


def rule(tensors: Sequence[Tensor], rows: DeltaRows) -> Tensor:
    query, key, value, log_decay, rate = tensors
    return delta_rule(query, key, value, log_decay, rate, rows)


def loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """S_t = S_{t-1} (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T, o_t = S_t q_t, for one sequence; a_t
    is a number, or a diagonal matrix."""
    out = []
    share = HEADS // k.size(1)
    state = torch.zeros(HEADS, DV, DK, dtype=v.dtype)
    for t in range(v.size(0)):
        heads = []
        new = []
        for h in range(HEADS):
            group = h // share
            key = k[t, group] / (k[t, group].square().sum() + 1e-6).sqrt()
            query = q[t, group] / (q[t, group].square().sum() + 1e-6).sqrt() / DK**0.5
            erase = torch.eye(DK, dtype=v.dtype) - rate[t, h] * torch.outer(key, key)
            s = decay[t, h].exp() * state[h] @ erase + rate[t, h] * torch.outer(v[t, h], key)
            heads.append(s @ query)
            new.append(s)
        state = torch.stack(new)
        out.append(torch.stack(heads))
    return torch.stack(out)


def split_loop(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    parts = zip(*(x.split(list(lengths)) for x in tensors))
    return torch.cat([loop(*part) for part in parts])


def with_gradients(function: object, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of a random weighted sum of it."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(leaves)  # type: ignore[operator]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@both
@pytest.mark.parametrize("lengths", [(37,), (1, 16, 17), (5, 40, 3, 16, 33)])
def test_packed_rows_are_the_papers_loop_on_each_sequence(
    lengths: tuple[int, ...], decays: tuple[int, ...]
) -> None:
    tensors = inputs(sum(lengths), decays)
    local = with_gradients(lambda x: rule(x, rows_of(lengths)), tensors)
    loops = with_gradients(lambda x: split_loop(x, lengths), tensors)
    for ours, theirs in zip(local, loops, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * float(theirs.abs().max()))


@both
def test_chunks_of_any_length_give_the_same(decays: tuple[int, ...]) -> None:
    lengths = (50, 7)
    tensors = inputs(sum(lengths), decays)
    one, other = (rule(tensors, rows_of(lengths, chunk)) for chunk in (64, 3))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@both
def test_nothing_crosses_sequences_not_even_a_nan(decays: tuple[int, ...]) -> None:
    lengths, own = (9, 20, 12), slice(9, 29)
    tensors, rows = inputs(sum(lengths), decays), rows_of(lengths)
    weight = torch.randn(HEADS * DV, 4, dtype=torch.float64)

    def network(x: Sequence[Tensor]) -> Tensor:
        mixed = causal_conv(x[2].flatten(1), weight, rows).view_as(x[2])
        return delta_rule(x[0], x[1], mixed, x[3], x[4], rows)

    clean = network(tensors)
    leaves = [x.clone() for x in tensors]
    for x in leaves:
        x[:9] = torch.nan
        x[29:] = torch.nan
        x.requires_grad_()
    out = network(leaves)
    assert torch.equal(out[own], clean[own])
    for gradient in torch.autograd.grad(out[own].sum(), leaves):
        assert bool(gradient[own].isfinite().all()) and bool(gradient[own].any())


@both
def test_the_same_bits_twice(decays: tuple[int, ...]) -> None:
    lengths = (30, 5, 18)
    tensors = inputs(sum(lengths), decays, dtype=torch.float32)
    once, twice = (with_gradients(lambda x: rule(x, rows_of(lengths)), tensors) for _ in range(2))
    assert all(map(torch.equal, once, twice))


@both
def test_strong_decay_stays_finite(decays: tuple[int, ...]) -> None:
    tensors = inputs(80, decays, dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], -80.0)
    assert all(
        bool(x.isfinite().all())
        for x in with_gradients(lambda x: rule(x, rows_of((80,), 64)), tensors)
    )


def test_strong_decay_of_some_channels_is_exact_in_float32() -> None:
    """exp(-G_j) of a chunk's sum G_j would overflow in them, and the others keep their state."""
    tensors = inputs(80, PER_CHANNEL, dtype=torch.float32)
    tensors[3][..., ::2] = -80.0
    tensors[3][..., 1::2] = -0.01
    exact = split_loop([x.double() for x in tensors], (80,))
    out = rule(tensors, rows_of((80,)))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@both
def test_transformers_chunked_rule(decays: tuple[int, ...]) -> None:
    """Which copies no head, with a decay per channel."""
    per_channel = decays == PER_CHANNEL
    tensors = inputs(100, decays, HEADS if per_channel else GROUPS, torch.float32)
    if per_channel:
        modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        chunked = modeling.chunk_kimi_delta_attention
    else:
        modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        chunked = modeling.torch_chunk_gated_delta_rule

    def theirs(x: Sequence[Tensor]) -> Tensor:
        out, _ = chunked(*(y.unsqueeze(0) for y in x), use_qk_l2norm_in_kernel=True)
        return out[0]  # type: ignore[no-any-return]

    for a, b in zip(
        with_gradients(lambda x: rule(x, rows_of((100,), 64)), tensors),
        with_gradients(theirs, tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("lengths", [(2,), (1, 5, 3)])
def test_convolution(lengths: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), 5, generator=g, dtype=torch.float64)
    weight = torch.randn(5, 4, generator=g, dtype=torch.float64)
    expected = [
        torch.conv1d(part.T, weight.unsqueeze(1), padding=3, groups=5)[:, : part.size(0)].T
        for part in x.split(list(lengths))
    ]
    torch.testing.assert_close(causal_conv(x, weight, rows_of(lengths)), torch.cat(expected))
