"""Stands in for SGLang's CUDA kernels, which its modules import by name. On a CPU none of them is
called; one that is says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"  # SGLang compares it with a least version

if not torch.cuda.is_available():
    # SGLang keeps the experts of every token in host memory that it registers with CUDA, for faster
    # copies from a GPU. There is none to copy from, so that registering is done as soon as it is
    # asked for.
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda *memory: 0, cudaHostUnregister=lambda *memory: 0
    )


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a CUDA kernel; this is SGLang without a GPU (scripts/sglang_cpu)"
        )

    return kernel
