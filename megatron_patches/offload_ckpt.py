"""Checkpoints of the CPU-offloading optimizer.

Target    optimizer.distrib_optimizer: DistributedOptimizer.{sharded_state_dict, state_dict,
          _set_main_param_and_optimizer_states}.
Why       1. The optimizer has no state before its first step.
          2. Its parameter groups hold the classes of its two inner optimizers.
          3. Loaded tensors become its state without a copy.
Without   1. It cannot be saved before its first step, and for loading into a fresh one
             megatron-core takes a step with random gradients. Here the initial state is created
             instead.
          2. The classes are pickled into the checkpoint. Loading them would take
             weights_only=False, which could execute code and which we never use. Here they are
             omitted: the optimizer that loads the checkpoint already has them.
          3. The state consists of views into tensors of all data-parallel ranks' parameters, which
             keep those in memory as long as the optimizer lives. Here each rank copies its shard.
When      Always. It affects only HybridDeviceOptimizer.
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
    """Create the initial state of a HybridDeviceOptimizer, for inner optimizers that are torch's
    Adam."""
    for part in hybrid.sub_optimizers:
        if isinstance(part, torch.optim.Adam | torch.optim.AdamW):
            init_adam_state(part)
    hybrid._sync_sub_optimizers_state_to_hdo()


def install() -> None:
    cls = find(NAME, CLASS)
    hybrid = find(NAME, HYBRID)
    originals = [find(NAME, f"{CLASS}.{method}") for method in METHODS]
    original_sharded, original_state, original_set = originals

    @functools.wraps(original_sharded)
    def sharded_state_dict(
        self: DistributedOptimizer, *args: object, **kwargs: object
    ) -> ShardedStateDict:
        if isinstance(self.optimizer, hybrid):
            init_offloaded_state(self.optimizer)
        return original_sharded(self, *args, **kwargs)

    @functools.wraps(original_state)
    def state_dict(self: DistributedOptimizer) -> StateDict:
        state: StateDict = original_state(self)
        if isinstance(self.optimizer, hybrid):
            groups = [_without_classes(group) for group in state["optimizer"]["param_groups"]]
            state["optimizer"] = {**state["optimizer"], "param_groups": groups}
        return state

    @functools.wraps(original_set)
    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        if isinstance(self.optimizer, hybrid):
            tensors = {name: value.clone() for name, value in tensors.items()}
        original_set(self, model_param, tensors)

    cls.sharded_state_dict = sharded_state_dict
    cls.state_dict = state_dict
    cls._set_main_param_and_optimizer_states = set_states


def _without_classes(group: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if not isinstance(value, type)}


PATCH = Patch(NAME, ALWAYS, check, install)
