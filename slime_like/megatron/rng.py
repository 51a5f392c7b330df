"""Random states of a process: torch's generators and megatron-core's RNG tracker, used by dropout
and initialisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomStates:
    """A copy of all random states."""

    host: Tensor
    cuda: Tensor | None  # of this process's device, or None
    tracked: dict[str, Tensor]  # those of megatron-core's tracker, by name

    @classmethod
    def now(cls) -> RandomStates:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        tracked = get_cuda_rng_tracker().get_states().items()
        return cls(torch.get_rng_state(), cuda, {name: state.clone() for name, state in tracked})

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        get_cuda_rng_tracker().set_states(dict(self.tracked))


def seed_stage(seed: int, pp_rank: int) -> None:
    """Seed all random states of the active layout: pipeline stages use seeds 100 apart;
    megatron-core offsets tensor- and expert-parallel ranks."""
    torch.manual_seed(seed + 100 * pp_rank)
    model_parallel_cuda_manual_seed(seed + 100 * pp_rank)
