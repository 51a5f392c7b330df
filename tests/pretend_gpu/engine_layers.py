"""What Transformer Engine's layers compute, in torch: one forward pass for each class of which
megatron-core builds its layers. Its own Python makes the parameters and their attributes; only the
kernels are replaced.

Not here: fp8, dropout, overlapped communication."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Product(torch.autograd.Function):
    """x weight^T. The gradient of a trained weight is added to `main_grad` in the backward pass
    (`fuse_wgrad_accumulation`), and autograd gets a placeholder that is not to be added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fused = fused
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            if ctx.fused:
                weight.main_grad.add_(of_weight)
                weight.grad_added_to_main_grad = True
                of_weight = torch.full_like(weight, float("nan"))
        return of_input, of_weight, None


def _parallel_product(layer: Any, x: Tensor) -> Any:
    """x: of this rank: its tokens under sequence parallelism, its columns if row-parallel."""
    # not at the top: megatron-core takes these classes as they are when it is imported
    from megatron.core.tensor_parallel import mappings

    group, mode = layer.tp_group, layer.parallel_mode
    if mode == "column" and layer.tp_size > 1:
        if layer.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=group)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
    output = _Product.apply(x, layer.weight, layer.fuse_wgrad_accumulation)
    if mode == "row" and layer.tp_size > 1:
        if layer.sequence_parallel:
            output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=group)
        else:
            output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
    if not layer.use_bias:
        return (output, None) if layer.return_bias else output
    if layer.return_bias:
        return output, layer.bias
    return output + layer.bias


def linear(self: Any, x: Tensor, is_first_microbatch: bool | None = None, **more: Any) -> Any:
    assert self.weight.device == x.device and not more
    return _parallel_product(self, x)


def layer_norm_linear(
    self: Any, x: Tensor, is_first_microbatch: bool | None = None, **more: Any
) -> Any:
    """The norm of x is no output of it, as megatron-core builds it."""
    assert not self.return_layernorm_output and not more
    scale = self.layer_norm_weight
    return _parallel_product(self, _norm(self, x, scale, self.layer_norm_bias, self.normalization))


def _norm(layer: Any, x: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    scale = 1 + scale if layer.zero_centered_gamma else scale
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], scale, layer.eps)
    return F.layer_norm(x, x.shape[-1:], scale, bias, layer.eps)


def rms_norm(self: Any, x: Tensor) -> Tensor:
    return _norm(self, x, self.weight, None, "RMSNorm")


def layer_norm(self: Any, x: Tensor) -> Tensor:
    return _norm(self, x, self.weight, self.bias, "LayerNorm")


def grouped_linear(
    self: Any, x: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **more: Any
) -> Any:
    """
    Args:
        x: Tokens of the first expert, of the second, ....
        m_splits: How many each has.
    """
    counts = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
    assert self.tp_size == 1 or self.parallel_mode is None, "the token dispatcher communicates"
    outputs = []
    for expert, tokens in enumerate(x.split(counts)):
        weight = getattr(self, f"weight{expert}")
        output = _Product.apply(tokens, weight, self.fuse_wgrad_accumulation)
        if self.apply_bias:
            output = output + getattr(self, f"bias{expert}")
        outputs.append(output)
    output = torch.cat(outputs)
    if self.return_bias:
        return output, [getattr(self, f"bias{expert}") for expert in range(len(counts))]
    return output


def attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    *, qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None, attn_mask_type: str | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """query, key, value: [tokens, heads, channels] of packed rows, or [tokens, rows, heads,
    channels]. Causal; [..., heads * channels]. With context parallelism every rank has of each
    sequence, cut into twice as many chunks as there are ranks, its chunk from the front and the
    one as far from the end."""
    assert "causal" in str(attn_mask_type)
    if (qkv_format or self.qkv_format) == "sbhd":
        assert self.cp_group is None
        rows = [
            _attend(self, *(t[:, i] for t in (query, key, value))) for i in range(query.size(1))
        ]
        return torch.stack(rows, 1)
    assert qkv_format == "thd" and cu_seqlens_q is not None
    starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    ends = starts.tolist()
    order = None
    if self.cp_group is not None:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        order = _chunk_order(ends, self.cp_group.size()).to(query.device)
        query, key, value = (
            gather_from_sequence_parallel_region(t, group=self.cp_group)[order.argsort()]
            for t in (query, key, value)
        )
    parts = [
        _attend(self, query[start:end], key[start:end], value[start:end])
        for start, end in itertools.pairwise(ends)
    ]
    output = torch.cat(parts)
    if order is not None:
        output = output[order].chunk(self.cp_group.size())[self.cp_group.rank()]
    return torch.cat([output, output.new_zeros(query.size(0) - ends[-1], output.size(-1))])


def _chunk_order(ends: list[int], ranks: int) -> Tensor:
    """Places in the packed row of the tokens of the first rank, of the second, ..."""
    places = []
    for rank in range(ranks):
        for start, end in itertools.pairwise(ends):
            chunks = torch.arange(start, end).chunk(2 * ranks)
            places += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.cat(places)


def _attend(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence: [tokens, heads, channels] each, fewer heads in key and value."""
    repeats = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * layer.softmax_scale
    count = query.size(0)
    distance = torch.arange(count, device=query.device)
    distance = distance[:, None] - distance[None]
    hidden = distance < 0
    left = layer.window_size[0] if layer.window_size else -1
    if left >= 0:
        hidden = hidden | (distance > left)
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.softmax_type == "vanilla":
        shares = scores.softmax(-1)
    else:
        sink = layer.softmax_offset.view(-1, 1, 1).expand(-1, count, 1).to(scores.dtype)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", shares, value).flatten(1)


def replace_kernels() -> None:
    """Give the classes of transformer_engine.pytorch these forward passes."""
    import transformer_engine.pytorch as engine
    from transformer_engine.pytorch.attention import rope

    engine.Linear.forward = linear
    engine.LayerNormLinear.forward = layer_norm_linear
    engine.RMSNorm.forward = rms_norm
    engine.LayerNorm.forward = layer_norm
    engine.GroupedLinear.forward = grouped_linear
    engine.DotProductAttention.forward = attention
    # its own Python has the same without a kernel
    rope.apply_rotary_pos_emb = _unfused(rope.apply_rotary_pos_emb)


def _unfused(apply: Any) -> Any:
    def applied(*tensors: Tensor, fused: bool = False, **more: Any) -> Tensor:
        result: Tensor = apply(*tensors, fused=False, **more)
        return result

    return applied
