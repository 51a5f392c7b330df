"""Gradient norm and scaling without a wait for each parameter.

Target    optimizer.clip_grads: l2_norm_impl and multi_tensor_scale_impl, where they are the local
          versions of megatron-core.
Why       The local norm collects the norm of each gradient on the host, by `torch.tensor` of a list
          of device scalars, and takes theirs there. The local scale makes a temporary per gradient.
Without   A wait per parameter tensor in each optimizer step, each with a launch behind it: about
          290 for 36 layers. And the norm of a bf16 gradient is rounded to bf16.
How       torch's foreach operations, which stay on the device, in a few launches.
When      Neither Transformer Engine nor Apex, which have kernels of their own.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_patches.patch import TORCH_ADAM, Patch, find

NAME = "torch_norms"
NORM = "optimizer.clip_grads:l2_norm_impl"
SCALE = "optimizer.clip_grads:multi_tensor_scale_impl"


def l2_norm(
    chunk_size: int, skip: object, lists: Sequence[Sequence[Tensor]], *args: object
) -> tuple[Tensor, None]:
    """The float32 norm [1] of all tensors of one list, computed in float32 or wider."""
    (tensors,) = lists
    dtype = torch.promote_types(torch.float32, tensors[0].dtype)
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def scale(chunk_size: int, skip: object, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Write each source times `factor` into its target, which is usually the source itself."""
    for source, target in zip(*lists, strict=True):
        if source is not target:
            target.copy_(source)
    torch._foreach_mul_(list(lists[1]), factor)


def check() -> None:
    for target in (NORM, SCALE):
        find(NAME, target)


def install() -> None:
    clip_grads = find(NAME, "optimizer.clip_grads")
    clip_grads.l2_norm_impl = l2_norm
    clip_grads.multi_tensor_scale_impl = scale


PATCH = Patch(NAME, TORCH_ADAM, check, install)
