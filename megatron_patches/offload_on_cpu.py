"""The CPU-offloading optimizer with parameters that are already on the CPU.

Target    optimizer.cpu_offloading.hybrid_optimizer:
          HybridDeviceOptimizer._get_sub_optimizer_param_groups.
Why       It offloads parameters that are on a GPU and pins their copies. Its step looks up the copy
          of every parameter of the CPU optimizer.
Without   The step raises KeyError, since parameters that were never on a GPU have no copy.
How       The parameters are divided as on a GPU: the fraction `--optimizer-offload-fraction` is
          copied, the CPU optimizer updates the copies, and the step copies them back. This runs the
          code of a GPU run, including checkpoints, but saves no memory: both copies are in host
          memory.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_patches.patch import NO_CUDA, Patch, find

if TYPE_CHECKING:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


NAME = "offload_on_cpu"
CLASS = "optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"


Group = dict[str, object]  # parameter group of an optimizer
Copies = dict[Tensor, Tensor]


def check() -> None:
    find(NAME, f"{CLASS}._get_sub_optimizer_param_groups")


def install() -> None:
    find(NAME, CLASS)._get_sub_optimizer_param_groups = sub_optimizer_groups


def sub_optimizer_groups(
    self: HybridDeviceOptimizer, offload_fraction: float
) -> tuple[list[Group], list[Group], Copies, Copies, Copies]:
    """Divide the parameters between the two optimizers.

    Returns:
        (groups of the CPU optimizers, groups of the device optimizers, parameter -> offloaded copy,
        the inverse, parameter -> fp32 copy).
    """
    parameters = chain.from_iterable(group["params"] for group in self.param_groups)
    remaining = offload_fraction * sum(parameter.numel() for parameter in parameters)
    host_groups = []
    device_groups = []
    copies: dict[Tensor, Tensor] = {}
    in_fp32: dict[Tensor, Tensor] = {}
    for group in self.param_groups:
        host: list[Tensor] = []
        device: list[Tensor] = []
        for parameter in group["params"]:
            offloaded = remaining > 0
            inner = parameter
            if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                inner = in_fp32[parameter] = parameter.detach().float()
            elif offloaded:
                inner = parameter.detach().clone()
            if offloaded:
                remaining -= parameter.numel()
                copies[parameter] = inner
            (host if offloaded else device).append(inner)
        host_groups += [{**group, "params": host}] if host else []
        device_groups += [{**group, "params": device}] if device else []
    inverse = {inner: parameter for parameter, inner in copies.items()}
    return host_groups, device_groups, copies, inverse, in_fp32


PATCH = Patch(NAME, NO_CUDA, check, install)
