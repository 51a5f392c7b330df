"""torch's flash attention of packed rows by plain arithmetic, with the checks of the CUDA kernel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.pretend_gpu.extension import C

LIBRARY = torch.library.Library("aten", "IMPL")


def register() -> None:
    LIBRARY.impl("_flash_attention_forward", _forward, "CUDA")
    LIBRARY.impl("_flash_attention_backward", _backward, "CUDA")


def _parts(cum: Tensor) -> list[tuple[int, int]]:
    """Start and end of each sequence, without a wait: the kernel reads them on the device."""
    bounds = C.cpu_alias(cum).tolist()
    return list(itertools.pairwise(bounds))


def _scores(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    """[heads, queries, keys] in float32; the windows count from the last key, -1 is no limit."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    queries, keys = scores.shape[1:]
    i = torch.arange(queries, device=q.device).unsqueeze(1) + (keys - queries)
    j = torch.arange(keys, device=q.device)
    keep = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if right >= 0:
        keep &= j <= i + right
    if left >= 0:
        keep &= j >= i - left
    return scores.masked_fill(~keep, float("-inf"))


def _settings(query: Tensor, is_causal: bool, options: dict[str, Any]) -> tuple[float, int, int]:
    scale, left, right = (
        options.get(name) for name in ("scale", "window_size_left", "window_size_right")
    )
    return (
        query.size(-1) ** -0.5 if scale is None else scale,
        -1 if left is None else left,
        0 if is_causal else -1 if right is None else right,
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert query.dtype in (torch.bfloat16, torch.float16), (
        "FlashAttention only support fp16 and bf16 data type"
    )
    assert cum_seq_q.dtype == torch.int32 and cum_seq_q.is_cuda, (
        "cu_seqlens_q must have dtype int32"
    )
    assert query.dim() == 3 and query.size(-1) % 8 == 0 and query.stride(-1) == 1
    assert dropout_p == 0.0
    scale, left, right = _settings(query, is_causal, options)
    group = query.size(1) // key.size(1)
    out = torch.empty_like(query)
    lse = torch.empty(query.size(1), query.size(0), dtype=torch.float32, device=query.device)
    for (a, b), (c, d) in zip(_parts(cum_seq_q), _parts(cum_seq_k), strict=True):
        assert b - a <= max_q and d - c <= max_k
        k, v = (x[c:d].repeat_interleave(group, dim=1) for x in (key, value))
        scores = _scores(query[a:b], k, scale, left, right)
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(out.dtype)
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    nothing = torch.empty(0, dtype=torch.uint64, device=query.device)
    return out, lse, state, nothing, torch.empty(0, dtype=query.dtype, device=query.device)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale, left, right = _settings(query, is_causal, options)
    group = query.size(1) // key.size(1)
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for (a, b), (c, d) in zip(_parts(cum_seq_q), _parts(cum_seq_k), strict=True):
        k, v = (x[c:d].repeat_interleave(group, dim=1).float() for x in (key, value))
        p = _scores(query[a:b], k, scale, left, right).softmax(-1)
        g = grad_out[a:b].float()
        dp = torch.einsum("qhd,khd->hqk", g, v)
        delta = (g * out[a:b].float()).sum(-1).T.unsqueeze(-1)
        ds = p * (dp - delta) * scale
        dq[a:b] = torch.einsum("hqk,khd->qhd", ds, k).to(dq.dtype)
        dk_heads = torch.einsum("hqk,qhd->khd", ds, query[a:b].float())
        dv_heads = torch.einsum("hqk,qhd->khd", p, g)
        dk[c:d] = dk_heads.unflatten(1, (-1, group)).sum(2).to(dk.dtype)
        dv[c:d] = dv_heads.unflatten(1, (-1, group)).sum(2).to(dv.dtype)
    return dq, dk, dv
