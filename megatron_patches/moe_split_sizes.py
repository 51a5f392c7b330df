"""Mixture of experts on CPU: the split sizes of the all-to-all.

Target    transformer.moe.moe_utils: maybe_move_tensor_to_cpu, and the name under which
          token_dispatcher imports it.
Why       The dispatcher passes `as_numpy=True` to get plain numbers, but the function converts only
          tensors that it moves from a GPU. A tensor that is already on the CPU stays a tensor.
Without   The all-to-all rejects the split sizes.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import torch

from megatron_patches.patch import NO_CUDA, Patch, find

NAME = "moe_split_sizes"
MODULES = ("transformer.moe.moe_utils", "transformer.moe.token_dispatcher")


def _to_numpy(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def check() -> None:
    for module in MODULES:
        find(NAME, f"{module}:maybe_move_tensor_to_cpu")


def install() -> None:
    for module in MODULES:
        find(NAME, module).maybe_move_tensor_to_cpu = _to_numpy


PATCH = Patch(NAME, NO_CUDA, check, install)
