"""Load checkpoints: verify files, check that they belong to this model, read, and compare
fingerprints. Every function is collective, and raises the same error on all ranks."""

from __future__ import annotations

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
from slime_like.checkpoints.state import TRAINER_FILE, TrainerState, read_trainer_state
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
)
from slime_like.megatron.checkpoint.rng_state import (
    new_random_states,
    random_state_file,
    restore_random_states,
)
from slime_like.megatron.checkpoint.write import METADATA_FILE, common_file
from slime_like.megatron.parallel_layout import ParallelLayout, in_own_layout

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
    unchanged = {}  # networks with the layout they were saved in
    for name, network in networks.items():
        saved = state.get("networks", {}).get(name)
        if saved is None:
            raise ValueError(
                f"checkpoint {folder} has no network {name!r}; it has: {', '.join(state.get('networks', {})) or 'none'}"
            )
        if network.optimizer is not None and not saved["optimizer"]:
            raise ValueError(
                f"checkpoint {folder} was saved with --no-save-optim; --no-load-optim starts the optimizer afresh"
            )
        _check_optimizer(folder, saved["optimizer"], network)
        same_layout = _same_layout(state, saved.get("layout", state["layout"]), network.layout)
        same_optimizer = same_layout and saved["optimizer"] == optimizer_kind(network)
        step = float(saved["optimizer_step"])
        _load_network(
            network,
            folder / name,
            step=None if same_optimizer and step else step,
            before_change=before_change,
        )  # megatron-core does not store step 0
        if same_layout:
            unchanged[name] = network
    if unchanged:  # equal on all ranks
        _check_fingerprints(folder, unchanged, state["fingerprints"][dist.get_rank()])
    if load_rng:
        if not state.get("has_rng"):
            raise ValueError(
                f"checkpoint {folder} was saved with --no-save-rng; --no-load-rng starts the random states afresh"
            )
        for owner, layout in layouts_of(networks).items():
            _load_random_states(folder, state, owner, layout, seed=seed)
    dist.barrier()
    return state


def load_weights(folder: Path, name: str, network: SavedNetwork, *, verify: bool) -> None:
    """Load the weights of the checkpoint's network `name` into `network`. Raises ValueError."""
    there = open_checkpoint(folder, verify=verify)["networks"]
    if name not in there:
        raise ValueError(
            f"checkpoint {folder} has no network {name!r}; it has: {', '.join(there) or 'none'}"
        )
    _load_network(network, folder / name)
    dist.barrier()


def open_checkpoint(folder: Path, *, verify: bool) -> TrainerState:
    """Check a checkpoint's files against its manifest; returns its trainer state. Raises ValueError
    naming the file."""

    def look() -> dict[str, FileRecord]:
        if not folder.is_dir():
            there = ", ".join(map(str, complete_steps(folder.parent))) or "none"
            raise ValueError(
                f"checkpoint {folder} does not exist; complete steps in {folder.parent}: {there}"
            )
        records = read_manifest(folder)
        if TRAINER_FILE not in records:
            raise ValueError(f"checkpoint {folder}: its manifest names no {TRAINER_FILE}")
        return records

    records = together(look)
    state = together(lambda: _state_of(folder, records))
    if verify:
        started = time.perf_counter()
        mine = split_by_size(records, dist.get_world_size())[dist.get_rank()]
        damaged = [
            text
            for part in gather(damaged_files(folder, records, mine, threads=READERS))
            for text in part
        ]
        if damaged:
            raise ValueError(damage(folder, damaged))
        seconds, size = time.perf_counter() - started, total_bytes(records) / 1e9
        logger.info(
            f"checkpoint {folder} verified: {size:.3f} GB in {seconds:.2f} s, {size / seconds:.2f} GB/s"
        )
    return state


def _state_of(folder: Path, records: Mapping[str, FileRecord]) -> TrainerState:
    """Read trainer.json after checking that all files are regular and have the right size. Raises
    ValueError."""
    found = (size_problem(folder, name, record.size) for name, record in records.items())
    wrong = [text for text in found if text is not None]
    if wrong:
        raise ValueError(damage(folder, wrong))
    state = read_trainer_state(folder)
    for network in state["networks"]:
        for name in (METADATA_FILE, CONFIG_FNAME, common_file()):
            if f"{network}/{name}" not in records:
                raise ValueError(f"checkpoint {folder}: its manifest names no {network}/{name}")
    return state


def damage(folder: Path, problems: Sequence[str]) -> str:
    """Error message about a damaged checkpoint, with the other checkpoints that could be used."""
    others = [
        step for step in complete_steps(folder.parent) if not folder.name.endswith(f"{step:07d}")
    ]
    remedy = (
        f"--ckpt-step takes another one ({', '.join(map(str, others))})"
        if others
        else "there is no other one in this folder"
    )
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
    there, here = optimizer_name(saved), optimizer_name(optimizer_kind(network))
    if there != here:
        raise ValueError(
            f"checkpoint {folder} has the optimizer state of {there}, not of {here}: give "
            f"--optimizer {there}, or --no-load-optim to start the optimizer afresh"
        )


def _check_model(folder: Path, saved: Mapping[str, object], model: Mapping[str, object]) -> None:
    if different := identity_differences(saved, model):
        raise ValueError(f"checkpoint {folder} is of another model: {', '.join(different)}")


@in_own_layout
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
    wanted = sharded_state(network, is_loading=True)
    own = None
    if network.optimizer is not None:
        own = extract_sharded_base(extract_nonpersistent(wanted["optimizer"])[1])[1]
        wanted[OWN_OPTIMIZER] = wanted.pop(
            "optimizer"
        )  # so that the saved non-tensor state is not merged into it

    def fit() -> None:
        saved = read_metadata(folder / METADATA_FILE).state_dict_metadata
        adapt_names(wanted, saved)
        if network.optimizer is not None:
            prefer_main_params(wanted, saved)
        if problems := shape_problems(wanted, saved):
            raise ValueError(f"checkpoint {folder} does not fit this model: {describe(problems)}")

    together(fit)
    before_change()  # megatron-core reads directly into the parameters
    optimizer = {name: wanted.pop(name) for name in (OWN_OPTIMIZER,) if name in wanted}
    try:
        loaded = dist_checkpointing.load(wanted, str(folder))
        if optimizer:  # separately: its fp32 parameters may be the same entries as the weights
            loaded |= dist_checkpointing.load(optimizer, str(folder))
    except (Exception, CheckpointException) as error:  # megatron-core and torch raise many types
        raise ValueError(
            f"checkpoint {folder} is damaged or does not fit this model: {_reason(error)}"
        ) from error

    def take() -> None:
        for index, chunk in enumerate(network.chunks):
            missing, unexpected = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
            lost = [name for name in missing if not name.endswith(EXTRA_STATE)]
            if lost or unexpected:
                raise ValueError(
                    f"checkpoint {folder} does not fit this model: {describe([*lost, *unexpected])}"
                )

    together(take)
    if network.optimizer is not None:
        common = loaded["optimizer"]
        if step is not None:
            common = own
            set_step(common, step)
        network.optimizer.load_state_dict(merge(common, loaded[OWN_OPTIMIZER]))


def _check_fingerprints(
    folder: Path, networks: Mapping[str, SavedNetwork], saved: Mapping[str, dict[str, str]]
) -> None:
    """Raise RunError on all ranks if the loaded bits of a rank differ from the saved ones. For
    networks in the layout they were saved in."""
    wrong = []
    for name, network in networks.items():
        wrong += [
            f"{part} of the {name}"
            for part in differences(saved.get(name, {}), fingerprint(network))
        ]
    found_wrong = [
        f"rank {rank}: {', '.join(parts)}" for rank, parts in enumerate(gather(wrong)) if parts
    ]
    if found_wrong:
        raise RunError(
            f"checkpoint {folder} was loaded, and what is here now differs from what was saved ({'; '.join(found_wrong)}): training would not "
            "go on as it was. Please report this"
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
    of = "" if owner == "policy" else f" for the {owner}"
    warn_rank_0(
        logger,
        f"the checkpoint's random states are for {saved or state['layout']}, this run is {layout.describe()}{of}: dropout draws new "
        "numbers, from --seed and the step (--no-load-rng says so without a warning)",
    )
    new_random_states(seed, int(state["step"]), layout)


def _reason(error: BaseException) -> str:
    """The message of the first failure; torch reports those of all ranks with their tracebacks."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__
