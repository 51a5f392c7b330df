"""No torch.compile on CPU, and none that could not compile.

Target    jit.jit_fuser, and the functions decorated with it when megatron.core is imported.
Why       jit_fuser is torch.compile.
Without   The decorator alone imports TorchInductor, which adds seconds to the start of every rank.
          Calling a decorated function needs a C++ compiler and a compilation, for functions of a
          few operations.
How       megatron.core is imported while torch.compile returns functions unchanged; afterwards
          jit_fuser is megatron-core's own noop_decorator. If megatron.core was imported earlier,
          its functions stay decorated.
When      No CUDA device, or no C compiler, which Triton needs at run time (images like python:slim
          have none): the first call of a decorated function would fail.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from megatron_patches.patch import NO_COMPILE, Patch, find

NAME = "jit_on_cpu"


def _no_compile(
    function: Callable[..., object] | None = None, **settings: object
) -> Callable[..., object]:
    return function if function is not None else _no_compile


def check() -> None:
    with mock.patch.object(torch, "compile", _no_compile):
        find(NAME, "jit:jit_fuser")
    find(NAME, "jit:noop_decorator")


def install() -> None:
    find(NAME, "jit").jit_fuser = find(NAME, "jit:noop_decorator")


PATCH = Patch(NAME, NO_COMPILE, check, install)
