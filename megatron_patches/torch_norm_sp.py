"""torch norms under sequence parallelism.

Target    transformer.torch_norm: WrappedTorchNorm.__new__, the norm of layer specs without
          Transformer Engine.
Why       It rejects `sequence_parallel`, although such a norm only lacks the attribute
          `sequence_parallel` on its parameters, by which megatron-core sums over the
          tensor-parallel ranks the gradients that each rank computes from its part of the sequence.
          On a CPU, torch's RMSNorm is a chain of operations, forward and backward.
Without   `--sequence-parallel` fails, and in a bf16 model the norms have fp32 parameters. RMSNorm
          takes twice as long on a CPU, with bitwise equal results.
When      No Transformer Engine.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_patches.patch import NO_TE, Patch, find

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


NAME = "torch_norm_sp"
TARGET = "transformer.torch_norm:WrappedTorchNorm.__new__"


class LeanNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, equation 4). Products
    and sums are those of torch's chain of operations, in its order, with fewer temporaries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., d]. again: x once more; it receives the gradient through r, since torch adds the
        two terms to the gradients of other uses one by one. weight: [d], of the same dtype."""
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, r)
        return x.mul(r).mul_(weight)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """dx = r w dy - x (x . w dy) r^3 / d; dw = sum over rows of x r dy."""
        x, weight, r = ctx.saved_tensors
        (dy,) = gradients
        product, dw = torch.mul(x, r), None
        if ctx.needs_input_grad[2]:
            dw = product.mul_(dy).sum(tuple(range(dy.dim() - 1)))
        if not ctx.needs_input_grad[0]:
            return None, None, dw, None
        dx = dy * weight
        dr = torch.mul(dx, x, out=product).sum(-1, keepdim=True)
        dmean = (-0.5 * dr * r.pow(3)) / x.size(-1)
        return dx.mul_(r), torch.mul(x, dmean * 2, out=product), dw, None


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with `LeanNorm` on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d]."""
        wide = x.dtype in (torch.float32, torch.float64) and self.weight.dtype is x.dtype
        if x.device.type != "cpu" or not wide or self.eps is None:
            return super().forward(x)
        return LeanNorm.apply(x, x, self.weight, self.eps)


NORMS: dict[str, type[torch.nn.Module]] = {
    "LayerNorm": torch.nn.LayerNorm,
    "RMSNorm": RMSNorm,
}


def _new(
    cls: type,
    config: TransformerConfig,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """Build the norm `config.normalization` over the last dimension [hidden_size], in
    `config.params_dtype`."""
    if config.normalization not in NORMS:
        raise ValueError(
            f"--normalization {config.normalization}: without Transformer Engine the legal values are {', '.join(NORMS)}"
        )
    for flag in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
        if getattr(config, flag):
            raise ValueError(f"{flag} needs Transformer Engine; leave it off")
    norm = NORMS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def check() -> None:
    find(NAME, TARGET)


def install() -> None:
    find(NAME, "transformer.torch_norm:WrappedTorchNorm").__new__ = _new


PATCH = Patch(NAME, NO_TE, check, install)
