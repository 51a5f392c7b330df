"""Random states of one rank as a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.rng import RandomStates, seed_stage

TRACKED = "tracker."


def random_state_file(rank: int, owner: str = "policy") -> str:
    """Path of a random-state file inside a checkpoint. owner: name of the layout, from
    `layouts_of`; "critic" only if the critic has a separate layout."""
    prefix = "" if owner == "policy" else f"{owner}_"
    return f"rng/{prefix}rank_{rank:05d}.safetensors"


def random_states(layout: ParallelLayout) -> bytes:
    with layout.activate():
        states = RandomStates.now()
    tensors = {"torch": states.host}
    if states.cuda is not None:
        tensors["cuda"] = states.cuda
    return save(tensors | {TRACKED + name: state for name, state in states.tracked.items()})


def restore_random_states(path: Path, layout: ParallelLayout) -> None:
    """Restore the random states of `random_states`. Raises ValueError naming the file."""
    try:
        states = load_file(str(path))
        tracked = {
            name.removeprefix(TRACKED): state
            for name, state in states.items()
            if name.startswith(TRACKED)
        }
        with layout.activate():
            RandomStates(states["torch"], states.get("cuda"), tracked).restore()
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({error}); --no-load-rng starts new random states"
        ) from error


def new_random_states(seed: int, step: int, layout: ParallelLayout) -> None:
    """Seed random states that no earlier step has used, for a layout without states in the
    checkpoint."""
    with layout.activate():
        seed_stage(seed + 1_000_003 * step, layout.pp_rank)
