"""Checks of the most expensive parts of a step: output head, attention, and the gain from
compiling."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_common import lognormal_lengths
from benchmarks.bench_head import VERSIONS, Problem, run
from benchmarks.gpu_check.common import Figures, Sizes, device, has_gpu, peak_bytes, seconds
from slime_like.preflight.flops import TERA, peak_tflops

LEAST_TOKENS = 1024  # of the head; if not even their logits fit, there is no ratio


def _problem(tokens: int, sizes: Sizes) -> Problem:
    _, vocab, hidden = sizes.head
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    place = device()
    torch.manual_seed(0)
    rows = torch.randn(tokens, hidden, dtype=dtype, device=place)
    weight = torch.randn(vocab, hidden, dtype=dtype, device=place).div_(hidden**0.5)
    labels = torch.randint(vocab, (tokens,), device=place)
    grads = torch.randn(2, tokens, device=place)
    return Problem(
        rows.requires_grad_(), weight.requires_grad_(), labels, grads, True, time.perf_counter
    )


def head(sizes: Sizes) -> Figures:
    """Forward and backward of log-probs and entropy, compared with versions that materialise the
    logits: plain, in place, and compiled. The number of tokens is halved until one of those
    fits."""
    tokens = sizes.head[0]
    while "time_ratio" not in (found := _compare_heads(tokens, sizes)) and tokens > LEAST_TOKENS:
        tokens //= 2
    return found | _liger(tokens, sizes)


def _compare_heads(tokens: int, sizes: Sizes) -> Figures:
    """Compare at a number of tokens. Ratios are to the fastest, and to the smallest, version that
    materialises the logits and fits."""
    problem = _problem(tokens, sizes)
    took = seconds(lambda: run("lean", problem))
    peak = peak_bytes(lambda: run("lean", problem))
    found: Figures = {"tokens": tokens, "lean_s": took, "lean_bytes": peak}
    others = [
        _measured("logits", lambda: run("naive", problem), found),
        _measured("in_place", lambda: run("in place", problem), found),
        _measured("compiled", _compiled_head(problem, sizes), found),
    ]
    times = [each[0] for each in others if each is not None]
    peaks = [each[1] for each in others if each is not None and each[1] is not None]
    if times:
        found["time_ratio"] = took / min(times)
    if peak is not None and peaks:
        found["memory_ratio"] = peak / min(peaks)
    return found


def _measured(
    name: str, function: Callable[[], object], found: Figures
) -> tuple[float, int | None] | None:
    """(seconds, peak bytes), also stored in `found`. None for a version that does not fit or
    compile; its error is stored in `found`."""
    try:
        took = seconds(function, repeats=3)
        peak = peak_bytes(function)
    except RuntimeError as error:  # includes out-of-memory and compiler errors
        found[f"{name}_s"] = type(error).__name__
        if has_gpu():
            torch.cuda.empty_cache()
        return None
    found |= {f"{name}_s": took, f"{name}_bytes": peak}
    return took, peak


def _compiled_head(problem: Problem, sizes: Sizes) -> Callable[[], object]:
    naive = torch.compile(VERSIONS["naive"], backend="eager" if sizes.rehearse else "inductor")

    def step() -> None:
        problem.hidden.grad = problem.weight.grad = None
        torch.autograd.backward(naive(problem, None), tuple(problem.grads))

    return step


def _liger(tokens: int, sizes: Sizes) -> Figures:
    """Liger's fused head, which computes no entropy, compared with ours without entropy
    gradient."""
    if not has_gpu() or importlib.util.find_spec("liger_kernel") is None:
        return {"liger": "not installed"}
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found, unused-ignore]

    problem = _problem(tokens, sizes)
    loss = LigerFusedLinearCrossEntropyLoss()

    def theirs() -> None:
        problem.hidden.grad = problem.weight.grad = None
        loss(problem.weight, problem.hidden, problem.labels).backward()

    return {"liger_s": seconds(theirs), "liger_bytes": peak_bytes(theirs)}


def attention(sizes: Sizes) -> Figures:
    """Forward and backward of packed attention over very different lengths, as a layer computes it
    on this device: FLOP/s, and their share of the device's peak."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_like.megatron.model.gpt import layer_spec
    from slime_like.megatron.ops.attention import packed_rows

    rows_of, heads, groups, width = sizes.attention
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * width, num_attention_heads=heads,
        num_query_groups=groups, kv_channels=width, attention_dropout=0.0, params_dtype=dtype,
    )  # fmt: skip
    kind = layer_spec(config, "local").submodules.self_attention.submodules.core_attention
    module = kind(config, 1, AttnMaskType.causal, "self")
    peak = peak_tflops(torch.cuda.get_device_name()) if has_gpu() else None
    found: Figures = {"attention": kind.__name__}
    for tokens in rows_of:
        lengths = _lengths(tokens)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        rows = packed_rows(bounds.to(device()))
        qkv = [
            torch.randn(tokens, n, width, dtype=dtype, device=device(), requires_grad=True)
            for n in (heads, groups, groups)
        ]

        def step(rows: object = rows, qkv: list[Tensor] = qkv) -> None:
            module(*qkv, None, packed_seq_params=rows).sum().backward()

        pairs = sum(n * n / 2 for n in lengths)
        tflops = 3 * 4 * width * heads * pairs / seconds(step) / TERA
        found[f"tflops_{tokens}"] = tflops
        if peak:
            found[f"share_of_peak_{tokens}"] = tflops / peak
    return found


def _lengths(tokens: int) -> list[int]:
    """Lengths that sum to `tokens`, with a few long ones."""
    drawn = [int(n) for n in lognormal_lengths(256, median=tokens / 16, longest=tokens // 2)]
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(drawn.pop(0), tokens - sum(lengths)))
    return lengths


def compiled(sizes: Sizes) -> Figures:
    """Norm and gated MLP of a layer, forward and backward: plain, compiled, and replayed as a CUDA
    graph. A ratio below 1 is the possible gain of a layer."""
    tokens, hidden = sizes.block
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    shapes = [(6 * hidden, hidden), (hidden, 3 * hidden)]
    up, down = (torch.randn(s, dtype=dtype, device=device()) / hidden**0.5 for s in shapes)
    scale = torch.ones(hidden, dtype=dtype, device=device())
    weights = [up.requires_grad_(), down.requires_grad_(), scale.requires_grad_()]

    def block(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        gate, value = F.linear(F.rms_norm(x, (hidden,), scale), up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * value, down)

    def times(function: Callable[..., Tensor], rows: int) -> float:
        x = torch.randn(rows, hidden, dtype=dtype, device=device(), requires_grad=True)
        return seconds(lambda: function(x, *weights).sum().backward(), repeats=10)

    fast = torch.compile(block, backend="eager" if sizes.rehearse else "inductor")
    found: Figures = {}
    for rows in (tokens, max(1, tokens // 64)):
        plain = times(block, rows)
        found |= {f"eager_s_{rows}": plain, f"compiled_ratio_{rows}": times(fast, rows) / plain}
        if has_gpu():
            sample = torch.randn(rows, hidden, dtype=dtype, device=device(), requires_grad=True)
            graphed: Any = torch.cuda.make_graphed_callables(block, (sample, *weights))
            found[f"graph_ratio_{rows}"] = times(graphed, rows) / plain
    return found
