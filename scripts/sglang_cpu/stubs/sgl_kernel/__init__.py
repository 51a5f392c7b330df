"""Stands in for SGLang's CUDA kernels, which its modules import by name. On a CPU none of them is called; one that is says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.10"  # SGLang compares it with a least version


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this is SGLang without a GPU (scripts/sglang_cpu)")

    return kernel
