"""Random states of one rank as a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor


def random_state_file(rank: int) -> str:
    """Its path inside a checkpoint."""
    return f"rng/rank_{rank:05d}.safetensors"


def random_states() -> bytes:
    """Of torch's generators, and of megatron-core's, which give dropout."""
    states: dict[str, Tensor] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states().items()
    return save(states | {f"tracker.{name}": state.clone() for name, state in tracked})


def restore_random_states(path: Path) -> None:
    """Raises ValueError naming the file."""
    try:
        states = load_file(str(path))
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        get_cuda_rng_tracker().set_states({n.removeprefix("tracker."): s for n, s in states.items() if n.startswith("tracker.")})
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); --no-load-rng starts the random states afresh") from error


def new_random_states(seed: int, step: int, pp_rank: int) -> None:
    """In a layout that the checkpoint has no states for: fresh ones that no earlier step has used. Constants as where a run starts: stages
    100 apart, tensor-parallel ranks told apart by megatron-core."""
    stage_seed = seed + 1_000_003 * step + 100 * pp_rank
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)
