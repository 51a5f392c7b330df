"""Random numbers on CPU: megatron-core's "cuda" RNG tracker uses the CPU generator.

Target    tensor_parallel.random: _get_cuda_rng_state, _set_cuda_rng_state,
          CudaRNGStatesTracker.fork.
Why       The first two call torch.cuda. `fork` warns whenever the CPU generator has advanced, which
          is intended here. Recomputation saves and restores both generators, which are the same one
          on CPU.
Without   An error from torch.cuda.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import NO_CUDA, Patch, find

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


NAME = "rng_on_cpu"
TARGETS = (
    "tensor_parallel.random:_get_cuda_rng_state",
    "tensor_parallel.random:_set_cuda_rng_state",
    "tensor_parallel.random:CudaRNGStatesTracker.fork",
    "tensor_parallel.random:_MODEL_PARALLEL_RNG_TRACKER_NAME",
)
# the tracker's name for the generator outside every fork; it is not in states_
DEFAULT_STATE = "default-rng"


def _get_state(
    device: object = None, clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def check() -> None:
    for target in TARGETS:
        find(NAME, target)


def install() -> None:
    module = find(NAME, "tensor_parallel.random")

    @contextlib.contextmanager
    def fork(
        self: CudaRNGStatesTracker, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME
    ) -> Iterator[None]:
        """Draw from the RNG state `name` inside the block. Forks nest, and each state continues
        where it was left."""
        if name not in self.states_:
            raise ValueError(f"random state {name!r} is unknown; known: {', '.join(self.states_)}")
        outer_name = self._current_state_name
        outer_state = torch.get_rng_state()
        if outer_name != DEFAULT_STATE:
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(
                self.states_[outer_name] if outer_name != DEFAULT_STATE else outer_state
            )
            self._current_state_name = outer_name

    module._get_cuda_rng_state = _get_state
    module._set_cuda_rng_state = _set_state
    module.CudaRNGStatesTracker.fork = fork


PATCH = Patch(NAME, NO_CUDA, check, install)
