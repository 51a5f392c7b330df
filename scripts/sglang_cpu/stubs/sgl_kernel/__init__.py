"""Stands in for SGLang's CUDA kernels, which its modules import by name. On a CPU none of them is
called; one that is says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"  # SGLang compares it with a least version


class _Unpinned:
    """A function that makes tensors, in ordinary memory."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self._make = make

    def __call__(self, *arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return self._make(*arguments, **settings)


if not torch.cuda.is_available():
    # SGLang keeps the experts of every token in host memory that it registers with CUDA, for faster
    # copies from a GPU. There is none to copy from, so that registering is done as soon as it is
    # asked for.
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda *memory: 0, cudaHostUnregister=lambda *memory: 0
    )

    # It keeps LoRA adapters in pinned memory, which torch has with an accelerator only.
    torch.tensor = _Unpinned(torch.tensor)
    torch.zeros = _Unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor

# Operators of SGLang's own CPU build, which its hybrid models look up when they are imported. The
# processor of Qwen's images imports these models; without a body they cannot be called either.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a CUDA kernel; this is SGLang without a GPU (scripts/sglang_cpu)"
        )

    return kernel
