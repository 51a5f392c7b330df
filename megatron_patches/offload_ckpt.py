"""Checkpoints of the CPU-offloading optimizer.

Target    optimizer.distrib_optimizer: DistributedOptimizer.{sharded_state_dict, state_dict, _set_main_param_and_optimizer_states}.
Why       1. Before its first step it has no state, and cannot be saved; to load into a fresh one megatron-core takes a step with random
             gradients first. Here the state of step 0 is made in its place.
          2. Its groups of parameters hold the classes of its two optimizers, which would be pickled
            into the checkpoint: reading it could
             run a program, and ours are read without. Here they are left out; the optimizer that
             loads has them.
          3. What is loaded becomes the state as it is: views into tensors of all data-parallel
            ranks' parameters, which stay in memory
             as long as the optimizer. Here each rank keeps a copy of its own part.
When      Always; it acts on HybridDeviceOptimizer only.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import ALWAYS, Patch, find
from megatron_patches.torch_adam_ckpt import init_adam_state

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


NAME = "offload_ckpt"
CLASS = "optimizer.distrib_optimizer:DistributedOptimizer"
HYBRID = "optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
METHODS = ("sharded_state_dict", "state_dict", "_set_main_param_and_optimizer_states")


def check() -> None:
    for method in METHODS:
        find(NAME, f"{CLASS}.{method}")
    for method in ("_sync_sub_optimizers_state_to_hdo", "_init_sub_optimizers"):
        find(NAME, f"{HYBRID}.{method}")


def init_offloaded_state(hybrid: HybridDeviceOptimizer) -> None:
    """Give a fresh HybridDeviceOptimizer the state it has before its first step, where its
    optimizers are torch's."""
    for part in hybrid.sub_optimizers:
        if isinstance(part, torch.optim.Adam | torch.optim.AdamW):
            init_adam_state(part)
    hybrid._sync_sub_optimizers_state_to_hdo()


def install() -> None:
    cls, hybrid = find(NAME, CLASS), find(NAME, HYBRID)
    was_sharded, was_state, was_set = (find(NAME, f"{CLASS}.{method}") for method in METHODS)

    @functools.wraps(was_sharded)
    def sharded_state_dict(
        self: DistributedOptimizer, *args: object, **kwargs: object
    ) -> ShardedStateDict:
        if isinstance(self.optimizer, hybrid):
            init_offloaded_state(self.optimizer)
        return was_sharded(self, *args, **kwargs)

    @functools.wraps(was_state)
    def state_dict(self: DistributedOptimizer) -> StateDict:
        found: StateDict = was_state(self)
        if isinstance(self.optimizer, hybrid):
            groups = found["optimizer"]["param_groups"]
            plain = [
                {name: value for name, value in group.items() if not isinstance(value, type)}
                for group in groups
            ]
            found["optimizer"] = {**found["optimizer"], "param_groups": plain}
        return found

    @functools.wraps(was_set)
    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        if isinstance(self.optimizer, hybrid):
            tensors = {name: value.clone() for name, value in tensors.items()}
        was_set(self, model_param, tensors)

    cls.sharded_state_dict, cls.state_dict, cls._set_main_param_and_optimizer_states = (
        sharded_state_dict,
        state_dict,
        set_states,
    )


PATCH = Patch(NAME, ALWAYS, check, install)
