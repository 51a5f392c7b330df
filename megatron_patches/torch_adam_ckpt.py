"""Checkpoints of the distributed optimizer with torch's Adam.

Target    optimizer.distrib_optimizer: DistributedOptimizer.{sharded_state_dict,
          _set_main_param_and_optimizer_states, load_state_dict}.
Why       Unlike Transformer Engine's and Apex's, torch's Adam keeps a tensor `step` in the state of
          each parameter, and has no state before its first step.
Without   megatron-core's code for it fails in three ways:
          1. `sharded_state_dict` reads `step` from the state, so a fresh optimizer can neither be
             saved nor loaded into. Here the initial state is created first: zero moments, as Adam
             itself would.
          2. The `fully_reshardable` format stores `step` with the parameter groups and not with
             each parameter, but looks it up there when loading: KeyError. Here `step` is added.
          3. Silent: `load_state_dict` gives all parameters one shared `step` tensor, which Adam
             increments once per parameter. The first loss after a resume is right, later ones are
             wrong. Here each parameter gets its own.
When      Neither Transformer Engine nor Apex.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import TORCH_ADAM, Patch, find
from megatron_patches.precision_adam import PrecisionAwareAdam

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


NAME = "torch_adam_ckpt"
CLASS = "optimizer.distrib_optimizer:DistributedOptimizer"
METHODS = ("sharded_state_dict", "_set_main_param_and_optimizer_states", "load_state_dict")


def init_adam_state(adam: torch.optim.Optimizer) -> None:
    """Create the initial state of every parameter that has none yet."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if adam.state[parameter]:
                continue
            if isinstance(adam, PrecisionAwareAdam):
                adam.initialize_state(parameter)
            else:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def check() -> None:
    for method in METHODS:
        find(NAME, f"{CLASS}.{method}")


def install() -> None:
    cls = find(NAME, CLASS)
    originals = [find(NAME, f"{CLASS}.{method}") for method in METHODS]
    original_sharded, original_set, original_load = originals

    @functools.wraps(original_sharded)
    def sharded_state_dict(
        self: DistributedOptimizer, *args: object, **kwargs: object
    ) -> ShardedStateDict:
        if not self.is_stub_optimizer and isinstance(
            self.optimizer, torch.optim.Adam | torch.optim.AdamW
        ):
            init_adam_state(self.optimizer)
        return original_sharded(self, *args, **kwargs)

    @functools.wraps(original_set)
    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        original_set(self, model_param, {**step, **tensors})

    @functools.wraps(original_load)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, object]) -> None:
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    cls.sharded_state_dict = sharded_state_dict
    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict


PATCH = Patch(NAME, TORCH_ADAM, check, install)
