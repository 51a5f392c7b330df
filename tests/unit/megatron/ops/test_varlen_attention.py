"""Packed attention by `torch.nn.attention.varlen`: when it is chosen, and with which arguments it
computes what our own attention does. Its kernel needs a GPU; here a loop in float64 stands for it,
and the real function takes the same arguments on the meta device."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import megatron_patches

megatron_patches.apply()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from slime_like.megatron.ops import varlen_attention  # noqa: E402
from slime_like.megatron.ops.attention import PackedAttention, packed_rows  # noqa: E402
from slime_like.megatron.ops.varlen_attention import (  # noqa: E402
    VarlenAttention,
    packed_attention,
    why_not_varlen,
)


def config(heads: int = 4, groups: int = 2, size: int = 8, **settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=size,
        **{"attention_dropout": 0.0, "params_dtype": torch.bfloat16, **settings},
    )


def loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What `varlen_attn` is documented to compute, in float64, one query after another."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert enable_gqa == (query.size(1) != key.size(1))
    shared = query.size(1) // key.size(1)
    keys, values = (x.double().repeat_interleave(shared, 1) for x in (key, value))
    before, after = window_size
    out = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:]):
        for i in range(start, end):
            first = start if before < 0 else max(start, i - before)
            last = end if after < 0 else min(end, i + after + 1)
            scores = scale * torch.einsum("hd,jhd->hj", query[i].double(), keys[first:last])
            out.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), values[first:last]))
    return torch.stack(out).to(query.dtype)


@pytest.mark.parametrize("lengths", [[5, 4, 6], [1, 1, 14], [9], [4, 4]])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_computes_what_packed_attention_does(lengths: list[int], groups: int) -> None:
    torch.manual_seed(1)
    settings = config(groups=groups, params_dtype=torch.float64), 1, AttnMaskType.causal, "self"
    varlen, ours = VarlenAttention(*settings), PackedAttention(*settings)
    varlen.attend = loop
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    rows, total = packed_rows(bounds), sum(lengths)
    qkv = [
        torch.randn(total, n, 8, dtype=torch.float64).requires_grad_() for n in (4, groups, groups)
    ]
    grad = torch.randn(total, 32, dtype=torch.float64)
    found = []
    for module in (varlen, ours):
        out = module(*qkv, None, packed_seq_params=rows)
        found.append([out.detach(), *torch.autograd.grad(out, qkv, grad)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2])
def test_torch_takes_the_arguments(groups: int) -> None:
    module = VarlenAttention(config(groups=groups), 1, AttnMaskType.causal, "self")
    assert module.attend is varlen_attn
    qkv = [
        torch.empty(9, n, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (4, groups, groups)
    ]
    rows = packed_rows(torch.tensor([0, 4, 9], dtype=torch.int32))
    out = module(*qkv, None, packed_seq_params=rows)
    assert out.shape == (9, 32) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert [x.grad.shape for x in qkv] == [x.shape for x in qkv]


@pytest.mark.parametrize(
    ("settings", "capability", "words"),
    [
        ({}, (9, 0), None),
        ({}, (8, 0), None),
        ({"params_dtype": torch.float16}, (10, 0), None),
        ({"size": 256}, (9, 0), None),
        ({}, None, "no flash attention for the device"),
        ({}, (7, 5), "compute capability 8.0, and this GPU has 7.5"),
        ({"params_dtype": torch.float32}, (9, 0), "the model is in float32"),
        ({"context_parallel_size": 2}, (9, 0), "context parallelism"),
        ({"attention_dropout": 0.1}, (9, 0), "--attention-dropout 0.1"),
        ({"size": 20}, (9, 0), "multiples of 8 up to 256, not 20"),
        ({"size": 264}, (9, 0), "up to 256, not 264"),
        ({"size": 256}, (8, 9), "up to 192, not 256"),
    ],
)
def test_the_choice(
    settings: dict[str, Any], capability: tuple[int, int] | None, words: str | None
) -> None:
    reason = why_not_varlen(config(**settings), capability)
    assert reason is None if words is None else reason is not None and words in reason


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    varlen_attention._log.cache_clear()
    with caplog.at_level(logging.INFO, logger="slime_like"):
        kinds = {packed_attention(config(params_dtype=torch.float32)) for _ in range(3)}
    expected = "sequence by sequence or in padded batches, not torch.nn.attention.varlen"
    assert kinds == {PackedAttention}
    assert sum(expected in record.getMessage() for record in caplog.records) == 1
