"""Mixture of experts on CPU: the sizes of the all-to-all's parts.

Target    maybe_move_tensor_to_cpu in transformer.moe.moe_utils, and token_dispatcher's own name for it.
Why       The dispatcher hands `as_numpy=True` to get plain sizes for the all-to-all, but the function converts only what
          it moves away from a GPU; a tensor that was on the CPU from the start stays one, which the
          collective refuses.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import torch

from megatron_patches.patch import NO_CUDA, Patch, find

NAME = "moe_split_sizes"
MODULES = ("transformer.moe.moe_utils", "transformer.moe.token_dispatcher")


def _on_cpu_already(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def check() -> None:
    for module in MODULES:
        find(NAME, f"{module}:maybe_move_tensor_to_cpu")


def install() -> None:
    for module in MODULES:
        find(NAME, module).maybe_move_tensor_to_cpu = _on_cpu_already


PATCH = Patch(NAME, NO_CUDA, check, install)
