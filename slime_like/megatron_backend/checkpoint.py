"""Checkpoints through megatron-core's distributed checkpointing.

    <save>/latest_checkpointed_iteration.txt     the step of the newest complete checkpoint
    <save>/iter_0000010/                         10 rollouts were trained on
        model/                                   weights, optimizer (torch_dist)
        rng/rank_00000.safetensors               random states of each rank
        trainer.json                             schedule, data position, weight version, layout

A checkpoint is written under a temporary name and renamed when it is whole; the tracker file is replaced last.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from slime_like.checkpoint_folders import TRACKER, checkpoint_folder, complete_steps
from slime_like.errors import RunError
from slime_like.megatron_backend.layout import ParallelLayout

# the format that can be loaded into another layout; megatron-core's default breaks without Transformer Engine
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    chunks: Sequence[Any],
    optimizer: MegatronOptimizer | None,
    save_rng: bool,
    trainer_state: dict[str, Any],
    layout: ParallelLayout,
) -> Path:
    """Write checkpoint `step`; collective. optimizer: None leaves it out. trainer_state: plain JSON, of rank 0. Raises RunError, or
    OSError, when it cannot be written."""
    final = checkpoint_folder(root, step)
    temporary = final.with_name(final.name + ".tmp")
    if layout.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        for part in ("model", "rng"):
            (temporary / part).mkdir(parents=True)
    dist.barrier()
    # Saving is synchronous, so a queue within this process will do. megatron-core would start a manager process on every rank, which
    # imports the whole program again, stays, and outlives a rank that is killed.
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        dist_checkpointing.save(_state_dict(chunks, optimizer, is_loading=False), str(temporary / "model"))
    except (OSError, CheckpointException) as error:
        raise RunError(f"checkpoint {final} could not be written, earlier ones are whole: {_reason(error)}") from error
    if save_rng:
        save_file(_rng_states(), str(_rng_file(temporary, layout.rank)))
    dist.barrier()
    if layout.rank == 0:
        _write(temporary / "trainer.json", json.dumps(trainer_state, indent=2, allow_nan=False))
        for path in temporary.rglob("*"):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(final.parent)
        tracker = Path(root) / TRACKER
        _write(tracker.with_suffix(".tmp"), str(step))
        tracker.with_suffix(".tmp").replace(tracker)
        _sync(tracker.parent)
    dist.barrier()
    return final


def load_checkpoint(
    folder: Path, *, chunks: Sequence[Any], optimizer: MegatronOptimizer | None, load_rng: bool, layout: ParallelLayout
) -> dict[str, Any]:
    """Restore weights and, unless None, the optimizer; collective. Returns the trainer's state.

    Raises ValueError naming the file or the tensor that does not fit.
    """
    state = read_trainer_state(folder)
    wanted = _state_dict(chunks, optimizer, is_loading=True)
    try:
        loaded = dist_checkpointing.load(wanted, str(folder / "model"))
    except (Exception, CheckpointException) as error:  # megatron-core and torch raise many kinds for a checkpoint that does not fit
        raise ValueError(f"checkpoint {folder} does not fit this model or is damaged: {_reason(error)}") from error
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    if load_rng:
        _restore_rng(_rng_file(folder, layout.rank), state["layout"], layout)
    dist.barrier()
    return state


def _reason(error: BaseException) -> str:
    """torch reports the failures of all ranks with their tracebacks; the first one's own words are enough."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint. Raises ValueError naming it."""
    path = folder / "trainer.json"
    if not folder.is_dir():
        there = ", ".join(map(str, complete_steps(folder.parent))) or "none"
        raise ValueError(f"checkpoint {folder} does not exist; complete steps in {folder.parent}: {there}")
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {folder}: {path.name} is missing or damaged ({error})") from error
    assert isinstance(state, dict)
    return state


def _state_dict(chunks: Sequence[Any], optimizer: MegatronOptimizer | None, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{index}": chunk.sharded_state_dict(metadata=METADATA) for index, chunk in enumerate(chunks)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=METADATA)
    return state


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / "rng" / f"rank_{rank:05d}.safetensors"


def _rng_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {f"tracker.{name}": state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}


def _restore_rng(path: Path, saved_layout: str, layout: ParallelLayout) -> None:
    if saved_layout != layout.describe():
        raise ValueError(
            f"the checkpoint's random states are for {saved_layout}, this run is {layout.describe()}; --no-load-rng starts them afresh"
        )
    if not path.exists():
        raise ValueError(f"the checkpoint has no random states ({path} is missing); --no-load-rng starts them afresh")
    states = load_file(str(path))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    get_cuda_rng_tracker().set_states(tracker)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
