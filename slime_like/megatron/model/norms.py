"""Norms that megatron-core's layers lack, added through the layer spec: post-norms after attention
and MLP (GLM-4; OLMo 2 and EXAONE 4, which have no others; Gemma 3, where layers with a sliding
window also have their own rotary base), norms over all heads of queries or keys at once
(MiniMax-M2), and zero-centered norms. Also Granite's multiplier of the outputs of attention and
MLP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from slime_like.megatron.ops.attention import PackedRows

WithBias = tuple[Tensor, Tensor | None]
# megatron-core's bias-dropout-add: (training, fused) -> function of output, residual and dropout
BiasDropoutAdd = Callable[[bool, bool], Callable[[WithBias, Tensor, float], Tensor]]


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm in float32 or wider; the weight, if any, is applied before rounding."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = F.rms_norm(wide, x.shape[-1:], eps=epsilon)
    return (normed if weight is None else weight.to(wide.dtype) * normed).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in float32 or wider, as in transformers. Under sequence parallelism a rank
    has some of the rows, and megatron-core sums the gradient of weights marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype)


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), for layers without Transformer Engine. It has the arguments of
    megatron-core's norms."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, x.shape[-1:], eps=self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class PostNormLayer(TransformerLayer):
    """A layer with what its config asks for of:

    - norms of the outputs of attention and MLP, before they are added to the residual stream,
    - `residual_multiplier`, by which these outputs are multiplied (Granite),
    - `window_rotary_base`, in layers with a sliding window, and `rotary_share`, in the others: the
      share of the pairs that is turned,
    - `layer_scalars`, a number by which the layer's output is multiplied (Gemma 4).
    """

    self_attn_bda: BiasDropoutAdd
    mlp_bda: BiasDropoutAdd

    def __init__(self, config: TransformerConfig, *args: object, **settings: object) -> None:
        super().__init__(config, *args, **settings)
        if config.post_self_attn_layernorm:
            self.post_self_attn_layernorm = _norm(config)
            self.self_attn_bda = _apply_before(self.post_self_attn_layernorm, self.self_attn_bda)
        if config.post_mlp_layernorm:
            self.post_mlp_layernorm = _norm(config)
            self.mlp_bda = _apply_before(self.post_mlp_layernorm, self.mlp_bda)
        if config.residual_multiplier != 1.0:
            multiply = partial(torch.mul, other=config.residual_multiplier)
            self.self_attn_bda = _apply_before(multiply, self.self_attn_bda)
            self.mlp_bda = _apply_before(multiply, self.mlp_bda)
        self.rotary_base: float | None = None  # replaces that of the model
        self.rotary_width = getattr(config, "window_rotary_width", None) or getattr(
            config, "window_channels", None
        )
        self.rotary_share = getattr(config, "rotary_share", 1.0)
        size = config.window_size
        layers = config.window_attn_skip_freq
        if is_layer_window_attention(size, layers, self.layer_number):
            self.rotary_share = 1.0
            self.rotary_base = config.window_rotary_base
            if self.rotary_base is not None and config.yarn_rotary_scaling_factor != 1:
                _without_yarns_scale(self.self_attention)
        self.has_scalar = getattr(config, "layer_scalars", False)
        if self.has_scalar:  # not trained, as in transformers
            self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, hidden_states: Tensor, *args: object, **settings: Any) -> object:
        angles = settings.get("rotary_pos_emb")
        if self.rotary_base is not None and angles is not None:
            assert isinstance(angles, Tensor)
            settings["rotary_pos_emb"] = _angles(angles, self.rotary_base, self.rotary_width)
        elif self.rotary_share < 1.0 and angles is not None:
            assert isinstance(angles, Tensor)
            settings["rotary_pos_emb"] = _turn_a_share(angles, self.rotary_share)
        hidden, *others = super().forward(hidden_states, *args, **settings)
        return self.end(hidden, settings.get("packed_seq_params")), *others

    def end(self, hidden: Tensor, rows: PackedRows | None) -> Tensor:
        """What the layer returns for its output."""
        return hidden * self.layer_scalar if self.has_scalar else hidden


def _without_yarns_scale(attention: Any) -> None:
    """Remove YaRN's scale of cosines and sines from one layer, which attention computes from its
    config: in every pass, or since megatron-core 0.19 when it is built."""
    attention.config = copy.copy(attention.config)
    attention.config.yarn_rotary_scaling_factor = 1.0
    attention._yarn_concentration_factor = 1.0


def _norm(config: TransformerConfig) -> torch.nn.Module:
    if config.layernorm_zero_centered_gamma:
        return ZeroCenteredRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
    return RMSNorm(config)


def _turn_a_share(angles: Tensor, share: float) -> Tensor:
    """The angles [positions, 1, 1, d] of the first pairs of halves; the others are 0."""
    half = angles.size(-1) // 2
    kept = torch.arange(half, device=angles.device) < int(share * half)
    return angles * kept.repeat(2)


def _angles(like: Tensor, base: float, width: int | None = None) -> Tensor:
    """Angles of a plain rotary embedding with base `base`, [positions, 1, 1, width], on the device
    of `like` and, without `width`, in its shape."""
    positions = like.size(0)
    dim = like.size(-1) if width is None else width
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=like.device) / dim
    rows = torch.arange(positions, dtype=torch.float32, device=like.device)
    half = torch.outer(rows, 1.0 / base**steps)
    return torch.cat([half, half], dim=-1)[:, None, None]


def _apply_before(change: Callable[[Tensor], Tensor], add: BiasDropoutAdd) -> BiasDropoutAdd:
    """Wrap megatron-core's bias-dropout-add so that its input is normalised or multiplied first."""

    def with_change(training: bool, fused: bool) -> Callable[[WithBias, Tensor, float], Tensor]:
        plain = add(training, fused)

        def changed_and_added(output: WithBias, residual: Tensor, dropout: float) -> Tensor:
            term, bias = output
            changed = change(term if bias is None else term + bias)
            return plain((changed, None), residual, dropout)

        return changed_and_added

    return with_change


class NormOfAllHeads(torch.nn.Module):
    """RMSNorm over all heads of a layer, [T, 1, heads / tp, d] -> the same. The mean square is
    reduced over the tensor-parallel ranks.

    The weight [heads * d] is replicated. Each rank computes the gradient for its own heads, and
    megatron-core sums them over the ranks, as for all parameters of `q_layernorm` and
    `k_layernorm`.
    """

    def __init__(self, heads: int, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(torch.ones(heads * dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self.group.size(), *x.shape[-2:])[self.group.rank()]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:  # all-reduce, in forward and in backward
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        scale = torch.rsqrt(squares / self.weight.numel() + self.eps)
        return weight * (wide * scale).to(x.dtype)


class QueryNorm(NormOfAllHeads):
    """`NormOfAllHeads` of the queries, with the arguments of megatron-core's norms. hidden_size:
    head dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps, config.params_dtype)


class KeyNorm(NormOfAllHeads):
    """`NormOfAllHeads` of the keys; see `QueryNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        heads = config.num_query_groups or config.num_attention_heads
        super().__init__(heads, hidden_size, eps, config.params_dtype)


def add_norms(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Add the norms that `config` asks for to a layer spec."""
    post_norms = config.post_self_attn_layernorm or config.post_mlp_layernorm
    own_angles = config.window_rotary_base is not None
    if post_norms or own_angles or config.residual_multiplier != 1.0:
        layer.module = PostNormLayer
    if config.without_pre_norms:
        _remove_pre_norms(layer)
    if config.qk_norm_of_all_heads:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = QueryNorm
        attention.k_layernorm = KeyNorm
    if config.layernorm_zero_centered_gamma and config.transformer_impl == "local":
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredRMSNorm
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ZeroCenteredRMSNorm


def _remove_pre_norms(layer: ModuleSpec) -> None:
    """Replace the norms of the inputs, or Transformer Engine's layers that begin with one."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    mlp = parts.mlp  # a ModuleSpec, or since 0.18 a functools.partial
    linears = (
        (parts.self_attention.submodules, "linear_qkv"),
        (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules, "linear_fc1"),
    )
    for owner, name in linears:
        if getattr(owner, name) is not ColumnParallelLinear:
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            setattr(owner, name, TEColumnParallelLinear)
