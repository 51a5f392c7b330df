"""Packed attention against one softmax(QK)V per sequence, in both of its forms."""

import math

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import megatron_patches

megatron_patches.apply()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from slime_like.megatron.ops.attention import PackedAttention, packed_rows  # noqa: E402
from slime_like.megatron.ops.window_attention import WindowAttention  # noqa: E402


def attention(heads: int, groups: int, size: int) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self")


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window: int = 10**6,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loops over sequences, heads and queries."""
    heads, groups, size = q.size(1), k.size(1), q.size(2)
    out, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            row, first = [], max(start, i + 1 - window)
            for h in range(heads):
                g = h * groups // heads
                scores = [q[i, h] @ k[j, g] / math.sqrt(size) for j in range(first, i + 1)]
                more = [] if sinks is None else [sinks[h]]
                shares = torch.stack([*scores, *more]).softmax(0)[: len(scores)]
                row.append((shares[:, None] * v[first : i + 1, g]).sum(0))
            out.append(torch.cat(row))
        start += length
    return torch.stack(out)


@pytest.mark.parametrize(
    ("lengths", "is_padded"),
    [([5, 4, 6], True), ([1, 1, 14], False), ([9], False), ([4, 4], False)],
)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_against_loops(lengths: list[int], is_padded: bool, groups: int) -> None:
    torch.manual_seed(1)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 8, requires_grad=True) for n in (4, groups, groups))
    rows = packed_rows(torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32))
    assert (rows.padded_indices is not None) == is_padded
    grad = torch.randn(total, 32)
    results = []
    for compute in (
        lambda: attention(4, groups, 8)(q, k, v, None, packed_seq_params=rows),
        lambda: by_hand(q, k, v, lengths),
    ):
        out = compute()
        results.append((out.detach(), torch.autograd.grad(out, (q, k, v), grad)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for ours, hand in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(ours, hand, rtol=1e-5, atol=1e-5)


def window_attention(window: int | None, sinks: torch.Tensor | None) -> WindowAttention:
    """Of a layer with a window, the second, behind one without."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[0, 1],
        softmax_type="vanilla" if sinks is None else "learnable",
    )
    module = WindowAttention(config, 2, AttnMaskType.causal, "self")
    if sinks is not None:
        module.softmax_offset = torch.nn.Parameter(sinks)
    return module


@pytest.mark.parametrize("lengths", [[5, 4, 6], [1, 1, 14], [9], [4, 4]])
@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks_against_loops(
    lengths: list[int], window: int | None, with_sinks: bool
) -> None:
    torch.manual_seed(1)
    rows = packed_rows(torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32))
    inputs = [torch.randn(sum(lengths), n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    inputs += [3 * torch.randn(4, dtype=torch.float64)] * with_sinks
    results = []
    for by_loops in (False, True):
        q, k, v, *sinks = leaves = [x.clone().requires_grad_() for x in inputs]
        sink = sinks[0] if sinks else None
        if by_loops:
            out = by_hand(q, k, v, lengths, window or 10**6, sink)
        else:
            module = window_attention(window, None if sink is None else sink.detach())
            leaves[3:] = [] if module.softmax_offset is None else [module.softmax_offset]
            out = module(q, k, v, None, packed_seq_params=rows)
        generator = torch.Generator().manual_seed(4)
        shares = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, shares)))
    for ours, hand in zip(*results, strict=True):
        torch.testing.assert_close(ours, hand, rtol=1e-12, atol=1e-13)


def test_a_layer_without_a_window_is_plain_attention() -> None:
    module, plain = window_attention(3, None), attention(4, 2, 8)
    rows = packed_rows(torch.tensor([0, 5, 9], dtype=torch.int32))
    q, k, v = (torch.randn(9, n, 8) for n in (4, 2, 2))
    first = WindowAttention(module.config, 1, AttnMaskType.causal, "self")
    outputs = [m(q, k, v, None, packed_seq_params=rows) for m in (first, plain, module)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[2], outputs[1])


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_last_queries_of_a_sequence(queries: int, window: int | None, with_sinks: bool) -> None:
    """As context-parallel ranks and blocks of a row have them, a single one too."""
    torch.manual_seed(3)
    module = window_attention(window, torch.randn(4).double() if with_sinks else None)
    q, k, v = (torch.randn(1, 8, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    part = module._sdpa(q[:, -queries:], k, v, causal_lower_right(queries, 8))
    torch.testing.assert_close(part, module._sdpa(q, k, v)[:, -queries:], rtol=1e-12, atol=1e-13)


def test_sequences_do_not_see_each_other() -> None:
    torch.manual_seed(2)
    rows = packed_rows(torch.tensor([0, 4, 9], dtype=torch.int32))
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    module = attention(2, 2, 8)
    before = module(q, k, v, None, packed_seq_params=rows)
    k[:4], v[:4] = 100.0, -100.0
    after = module(q, k, v, None, packed_seq_params=rows)
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])
