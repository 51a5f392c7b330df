"""Load checkpoints: verify files, check that they belong to this model, read, and compare
fingerprints. Every function is collective, and raises the same error on all ranks."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patches.safe_checkpoints import read_metadata
from slime_like.checkpoints.files import FileRecord
from slime_like.checkpoints.folders import complete_steps
from slime_like.checkpoints.manifest import (
    MANIFEST,
    damaged_files,
    describe,
    identity_differences,
    read_identity,
    read_manifest,
    size_problem,
    split_by_size,
    total_bytes,
)
from slime_like.checkpoints.state import (
    TRAINER_FILE,
    SavedPart,
    TrainerState,
    read_trainer_state,
)
from slime_like.distributed.collectives import gather, together
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.megatron.checkpoint.fingerprint import differences, fingerprint
from slime_like.megatron.checkpoint.networks import (
    EXTRA_STATE,
    OWN_OPTIMIZER,
    SavedNetwork,
    adapt_names,
    layouts_of,
    optimizer_kind,
    optimizer_name,
    prefer_main_params,
    set_step,
    shape_problems,
    sharded_state,
    tower_problem,
)
from slime_like.megatron.checkpoint.rng_state import (
    new_random_states,
    random_state_file,
    restore_random_states,
)
from slime_like.megatron.checkpoint.write import METADATA_FILE, common_file
from slime_like.megatron.loss_scale import loss_scale_of
from slime_like.megatron.parallel_layout import ParallelLayout, with_layout_active

logger = logging.getLogger(__name__)

READERS = 4  # threads of one rank


def load_checkpoint(
    folder: Path,
    networks: Mapping[str, SavedNetwork],
    *,
    load_rng: bool,
    verify: bool,
    seed: int,
    model: Mapping[str, object],
    before_change: Callable[[], None] = lambda: None,
) -> TrainerState:
    """Restore networks and, with load_rng, random states.

    Args:
        model: Settings of this run's model, to report differences.
        before_change: Called before any network is modified; earlier errors leave everything
            unchanged.

    Returns:
        The saved trainer state.

    Raises:
        ValueError: Names the file, setting or tensor at fault.
        RunError: The loaded state differs from the saved one.
    """
    identity = together(lambda: saved_identity(folder))  # before gigabytes are verified
    _check_model(folder, identity.get("model", {}), model)
    state = open_checkpoint(folder, verify=verify)
    _check_model(folder, state.get("model", {}), model)
    same_layout = {}  # networks with the layout they were saved in
    for name, network in networks.items():
        saved = _saved_part(folder, state, name)
        _check_optimizer(folder, saved["optimizer"], network)
        if _same_layout(state, saved.get("layout", state["layout"]), network.layout):
            same_layout[name] = network
        same_optimizer = name in same_layout and saved["optimizer"] == optimizer_kind(network)
        step = float(saved["optimizer_step"])  # megatron-core does not store step 0
        set_to = None if same_optimizer and step else step
        _load_network(network, folder / name, step=set_to, before_change=before_change)
        _restore_loss_scale(network, saved.get("loss_scale"))
    if same_layout:  # equal on all ranks
        _check_fingerprints(folder, same_layout, state["fingerprints"][dist.get_rank()])
    if load_rng:
        if not state.get("has_rng"):
            raise ValueError(
                f"checkpoint {folder} was saved with --no-save-rng; --no-load-rng starts new "
                "random states"
            )
        for owner, layout in layouts_of(networks).items():
            _load_random_states(folder, state, owner, layout, seed=seed)
    dist.barrier()
    return state


def _restore_loss_scale(network: SavedNetwork, saved: Sequence[float] | None) -> None:
    """Layouts and kinds of optimizers share it. A checkpoint of another precision has none."""
    scale = None if network.optimizer is None else loss_scale_of(network.optimizer)
    if scale is not None and saved is not None:
        scale.restore(saved)


def load_weights(folder: Path, name: str, network: SavedNetwork, *, verify: bool) -> None:
    """Load the weights of the checkpoint's network `name` into `network`. Raises ValueError."""
    _saved_part(folder, open_checkpoint(folder, verify=verify), name)
    _load_network(network, folder / name)
    dist.barrier()


def _saved_part(folder: Path, state: TrainerState, name: str) -> SavedPart:
    networks = state.get("networks", {})
    if name not in networks:
        names = ", ".join(networks) or "none"
        raise ValueError(f"checkpoint {folder} has no network {name!r}; it has: {names}")
    return networks[name]


def open_checkpoint(folder: Path, *, verify: bool) -> TrainerState:
    """Check a checkpoint's files against its manifest; returns its trainer state. Raises ValueError
    naming the file."""

    def read_records() -> dict[str, FileRecord]:
        if not folder.is_dir():
            steps = ", ".join(map(str, complete_steps(folder.parent))) or "none"
            raise ValueError(
                f"checkpoint {folder} does not exist; complete steps in {folder.parent}: {steps}"
            )
        records = read_manifest(folder)
        if TRAINER_FILE not in records:
            raise ValueError(f"checkpoint {folder}: its manifest names no {TRAINER_FILE}")
        return records

    records = together(read_records)
    state = together(lambda: _read_state(folder, records))
    if verify:
        started = time.perf_counter()
        names = split_by_size(records, dist.get_world_size())[dist.get_rank()]
        damaged = gather(damaged_files(folder, records, names, threads=READERS))
        if any(damaged):
            raise ValueError(damage_message(folder, list(itertools.chain(*damaged))))
        seconds = time.perf_counter() - started
        size = total_bytes(records) / 1e9
        logger.info(
            f"checkpoint {folder} verified: {size:.3f} GB in {seconds:.2f} s, "
            f"{size / seconds:.2f} GB/s"
        )
    return state


def _read_state(folder: Path, records: Mapping[str, FileRecord]) -> TrainerState:
    """Read trainer.json after checking that all files are regular and have the right size. Raises
    ValueError."""
    checks = (size_problem(folder, name, record.size) for name, record in records.items())
    problems = [problem for problem in checks if problem is not None]
    if problems:
        raise ValueError(damage_message(folder, problems))
    state = read_trainer_state(folder)
    for network in state["networks"]:
        for name in (METADATA_FILE, CONFIG_FNAME, common_file()):
            if f"{network}/{name}" not in records:
                raise ValueError(f"checkpoint {folder}: its manifest names no {network}/{name}")
    return state


def damage_message(folder: Path, problems: Sequence[str]) -> str:
    """Error message about a damaged checkpoint, with the other checkpoints that could be used."""
    steps = complete_steps(folder.parent)
    others = [str(step) for step in steps if not folder.name.endswith(f"{step:07d}")]
    remedy = "there is no other one in this folder"
    if others:
        remedy = f"--ckpt-step takes another one ({', '.join(others)})"
    return f"checkpoint {folder} is damaged: {describe(sorted(problems))}; {remedy}"


def saved_identity(folder: Path) -> dict[str, dict[str, object]]:
    """`read_identity`, or {} if there is no manifest, which `open_checkpoint` reports."""
    return read_identity(folder) if (folder / MANIFEST).is_file() else {}


def saved_networks(folder: Path) -> Collection[str]:
    """Names of the networks in a checkpoint; empty if it cannot be read, which `load_checkpoint`
    reports."""
    try:
        return list(read_trainer_state(folder)["networks"])
    except ValueError:
        return []


def is_converted(folder: Path) -> bool:
    """Whether a checkpoint only contains converted weights and cannot be resumed from."""
    try:
        return bool(read_trainer_state(folder).get("weights_only"))
    except ValueError:
        return False


def _check_optimizer(folder: Path, saved: Sequence[str], network: SavedNetwork) -> None:
    if network.optimizer is None:
        return
    if not saved:
        raise ValueError(
            f"checkpoint {folder} was saved with --no-save-optim; --no-load-optim resets the "
            "optimizer"
        )
    saved_name = optimizer_name(saved)
    name = optimizer_name(optimizer_kind(network))
    if saved_name != name:
        raise ValueError(
            f"checkpoint {folder} has the optimizer state of {saved_name}, not of {name}: give "
            f"--optimizer {saved_name}, or --no-load-optim to reset the optimizer"
        )


def _check_model(folder: Path, saved: Mapping[str, object], model: Mapping[str, object]) -> None:
    if different := identity_differences(saved, model):
        raise ValueError(f"checkpoint {folder} is of another model: {', '.join(different)}")


@with_layout_active
def _load_network(
    network: SavedNetwork,
    folder: Path,
    *,
    step: float | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> None:
    """Load one network, in its own layout.

    step: Adam's step count, given if the saved non-tensor state of the optimizer (its parameter
    groups) is from another layout or kind of optimizer. This run's own is used instead; its
    learning rates and weight decay come from the schedule.
    """
    state = sharded_state(network, is_loading=True)
    own_common = None
    if network.optimizer is not None:
        own_common = extract_sharded_base(extract_nonpersistent(state["optimizer"])[1])[1]
        # renamed, so that the saved non-tensor state is not merged into it
        state[OWN_OPTIMIZER] = state.pop("optimizer")

    def adapt_to_checkpoint() -> None:
        saved = read_metadata(folder / METADATA_FILE).state_dict_metadata
        adapt_names(state, saved)
        if network.optimizer is not None:
            prefer_main_params(state, saved)
        problems = shape_problems(state, saved)
        if problem := tower_problem(network.chunks, problems, saved):
            raise ValueError(f"checkpoint {folder} {problem}")
        if problems:
            raise ValueError(f"checkpoint {folder} does not fit this model: {describe(problems)}")

    together(adapt_to_checkpoint)
    before_change()  # megatron-core reads directly into the parameters
    optimizer = {name: state.pop(name) for name in (OWN_OPTIMIZER,) if name in state}
    try:
        loaded = dist_checkpointing.load(state, str(folder))
        if optimizer:  # separately: its fp32 parameters may be the same entries as the weights
            loaded |= dist_checkpointing.load(optimizer, str(folder))
    except (Exception, CheckpointException) as error:  # megatron-core and torch raise many types
        raise ValueError(
            f"checkpoint {folder} is damaged or does not fit this model: {_first_failure(error)}"
        ) from error

    def load_chunks() -> None:
        for index, chunk in enumerate(network.chunks):
            missing, unexpected = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
            names = [name for name in missing if not name.endswith(EXTRA_STATE)] + unexpected
            if names:
                raise ValueError(f"checkpoint {folder} does not fit this model: {describe(names)}")

    together(load_chunks)
    if network.optimizer is not None:
        common = loaded["optimizer"]
        if step is not None:
            common = own_common
            set_step(common, step)
        network.optimizer.load_state_dict(merge(common, loaded[OWN_OPTIMIZER]))


def _check_fingerprints(
    folder: Path, networks: Mapping[str, SavedNetwork], saved: Mapping[str, dict[str, str]]
) -> None:
    """Raise RunError on all ranks if the loaded bits of a rank differ from the saved ones. For
    networks in the layout they were saved in."""
    different = []
    for name, network in networks.items():
        parts = differences(saved.get(name, {}), fingerprint(network))
        different += [f"{part} of the {name}" for part in parts]
    by_rank = enumerate(gather(different))
    if problems := [f"rank {rank}: {', '.join(parts)}" for rank, parts in by_rank if parts]:
        raise RunError(
            f"checkpoint {folder} was loaded, but the state differs from what was saved "
            f"({'; '.join(problems)}): training would not continue as before. Please report this"
        )


def _same_layout(state: TrainerState, saved: str, layout: ParallelLayout) -> bool:
    return saved == layout.describe() and state["world_size"] == layout.world_size


def _load_random_states(
    folder: Path,
    state: TrainerState,
    owner: str,
    layout: ParallelLayout,
    *,
    seed: int,
) -> None:
    """Restore the random states of one layout, or draw new ones with a warning if the checkpoint
    has another layout. owner: name of the layout, from `layouts_of`."""
    saved = state.get("random_states", {"policy": state["layout"]}).get(owner)
    if saved is not None and _same_layout(state, saved, layout):
        together(
            lambda: restore_random_states(folder / random_state_file(layout.rank, owner), layout)
        )
        return
    network = "" if owner == "policy" else f" for the {owner}"
    warn_rank_0(
        logger,
        f"the checkpoint's random states are for {saved or state['layout']}, this run is "
        f"{layout.describe()}{network}: dropout draws new numbers, from --seed and the step "
        "(--no-load-rng does the same without a warning)",
    )
    new_random_states(seed, int(state["step"]), layout)


def _first_failure(error: BaseException) -> str:
    """The message of the first failure; torch reports those of all ranks with their tracebacks."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__
