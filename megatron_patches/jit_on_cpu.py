"""No torch.compile on CPU.

Target    jit.jit_fuser, and the functions that it decorates while megatron.core is imported.
Why       It is torch.compile. To decorate a function is enough to import TorchInductor, seconds of every start of every
          rank; to call one would need a C++ compiler and a compilation, for functions of a few operations.
How       megatron.core is imported with a torch.compile that gives functions back as they are; after that jit_fuser is
          megatron-core's own noop_decorator. Functions of a megatron.core that was imported earlier stay decorated.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from megatron_patches.patch import NO_CUDA, Patch, find

NAME = "jit_on_cpu"


def _as_it_is(
    function: Callable[..., object] | None = None, **settings: object
) -> Callable[..., object]:
    return function if function is not None else _as_it_is


def check() -> None:
    with mock.patch.object(torch, "compile", _as_it_is):
        find(NAME, "jit:jit_fuser")
    find(NAME, "jit:noop_decorator")


def install() -> None:
    find(NAME, "jit").jit_fuser = find(NAME, "jit:noop_decorator")


PATCH = Patch(NAME, NO_CUDA, check, install)
