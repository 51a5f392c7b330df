"""A stand-in for the package `transformer_engine`: the base classes of megatron-core's wrappers in
plain torch, with Transformer Engine's names, shapes and extra state, and without its kernels. On
one process the layers compute the same as Transformer Engine's; tensor-parallel layers hold their
shard and do not communicate.

    install()   # before importing anything of megatron-core

The names in checkpoints then come from megatron-core's own code for Transformer Engine.
"""

from __future__ import annotations

import importlib.machinery
import pickle
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the newest for which megatron-core imports nothing but layers; names in checkpoints are the same
# since 1.9
VERSION = "1.12.0"


class _WithExtraState(nn.Module):
    """Transformer Engine's modules keep their fp8 state as a pickle in a tensor of bytes, empty
    without fp8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is not None and state.numel():
            pickle.loads(bytes(state.tolist()))  # as Transformer Engine does


def _parameter(*shape: int, dtype: torch.dtype, init: Any = nn.init.ones_) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype))
    init(parameter)
    return parameter


class RMSNorm(nn.Module):
    """The mark on a parameter has its gradient summed over tensor-parallel ranks. megatron-core
    says `normalized_shape` since 0.19, `hidden_size` before."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        *,
        params_dtype: torch.dtype,
        sequence_parallel: bool = False,
        hidden_size: int | None = None,
        zero_centered_gamma: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        self.offset = float(zero_centered_gamma)
        hidden_size = normalized_shape or hidden_size
        assert hidden_size is not None
        self.eps = eps
        self.weight = _parameter(hidden_size, dtype=params_dtype)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight + self.offset, self.eps)


class LayerNorm(RMSNorm):
    def __init__(
        self,
        *sizes: Any,
        params_dtype: torch.dtype,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        own: dict[str, Any] = {
            "params_dtype": params_dtype,
            "sequence_parallel": sequence_parallel,
        }
        super().__init__(*sizes, **own, **others)
        self.bias = _parameter(len(self.weight), dtype=params_dtype, init=nn.init.zeros_)
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


class Linear(_WithExtraState):
    def __init__(
        self, in_features: int, out_features: int, *, parallel_mode: str | None, tp_size: int, init_method: Any, bias: bool, return_bias: bool,
        params_dtype: torch.dtype, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not return_bias, "of layers that leave adding the bias to others"
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.in_features, self.out_features = columns, rows
        self.parallel_mode, self.tp_size, self.use_bias = parallel_mode, tp_size, bias
        self.weight = _parameter(rows, columns, dtype=params_dtype, init=init_method)
        self.bias = _parameter(rows, dtype=params_dtype, init=nn.init.zeros_) if bias else None

    def forward(self, rows: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert self.tp_size == 1
        return F.linear(rows, self.weight, self.bias)


class LayerNormLinear(Linear):
    """The norm's parameters are the linear layer's own."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        params_dtype: torch.dtype,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)
        self.layer_norm_bias = (
            _parameter(in_features, dtype=params_dtype, init=nn.init.zeros_)
            if normalization == "LayerNorm"
            else None
        )

    def forward(self, rows: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if self.layer_norm_bias is None:
            return super().forward(
                F.rms_norm(rows, rows.shape[-1:], self.layer_norm_weight, self.eps)
            )
        return super().forward(
            F.layer_norm(
                rows, rows.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps
            )
        )


class GroupedLinear(_WithExtraState):
    """One weight for each expert of this rank."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, parallel_mode: str | None, tp_size: int, init_method: Any, bias: bool,
        params_dtype: torch.dtype, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, bias, tp_size
        self.fp8, self.fp8_calibration, self.fp8_meta = (
            False,
            False,
            {"fp8_checkpoint": False, "recipe": None},
        )
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        for index in range(num_gemms):
            setattr(
                self,
                f"weight{index}",
                _parameter(rows, columns, dtype=params_dtype, init=init_method),
            )

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing without fp8."""

    def forward(
        self, rows: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:
        assert self.tp_size == 1
        parts = zip(
            rows.split(m_splits),
            (getattr(self, f"weight{index}") for index in range(self.num_gemms)),
            strict=True,
        )
        return torch.cat([F.linear(part, weight) for part, weight in parts])


class DotProductAttention(_WithExtraState):
    """Of packed rows [T, heads, channels]; each sequence by itself."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, **others: Any) -> None:
        super().__init__()
        self.qkv_format, self.num_splits = "sbhd", None
        self.scale = others.get("softmax_scale")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        cu_seqlens_q: Tensor,
        **others: Any,
    ) -> Tensor:
        lengths = cu_seqlens_q.diff().tolist()
        parts = zip(
            *(rows.transpose(0, 1).split(lengths, dim=1) for rows in (query, key, value)),
            strict=True,
        )
        done = [
            F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=self.scale, enable_gqa=True
            )[0]
            for q, k, v in parts
        ]
        return torch.cat(done, dim=1).transpose(0, 1).flatten(1)


class _Unused:
    """What is named where megatron-core's wrappers are defined, and never made here."""


def install() -> None:
    """Make `import transformer_engine` find the classes above."""
    assert "megatron.core" not in sys.modules, "it asks for Transformer Engine while it is imported"
    package = _module("transformer_engine", __version__=VERSION)
    layers = (Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm, DotProductAttention)
    package.pytorch = _module(
        "transformer_engine.pytorch", **{layer.__name__: layer for layer in layers}
    )
    package.pytorch.fp8 = _module(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=_Unused,
        fp8_autocast=_Unused,
        fp8_model_init=_Unused,
    )
    unused = {name: _Unused for name in ("CudaRNGStatesTracker", "activation_recompute_forward")}
    package.pytorch.distributed = _module("transformer_engine.pytorch.distributed", **unused)
    package.pytorch.float8_tensor = _module(
        "transformer_engine.pytorch.float8_tensor", Float8Tensor=_Unused
    )
    package.pytorch.cpp_extensions = _module(
        "transformer_engine.pytorch.cpp_extensions", cast_to_fp8=_Unused
    )
    _module("transformer_engine_torch")  # its extension
    package.common = _module("transformer_engine.common")
    package.common.recipe = _module("transformer_engine.common.recipe", DelayedScaling=_Unused)


def _module(name: str, **members: Any) -> Any:
    module: Any = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module
    return module
