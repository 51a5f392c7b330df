"""trainer.json of a checkpoint: everything except tensors. Validated here for all readers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

from slime_like.checkpoints.files import read_json

TRAINER_FILE = "trainer.json"


class SavedPart(TypedDict, total=False):
    """Description of one saved network."""

    optimizer: list[str]
    optimizer_step: float
    scheduler: dict[str, object]
    layout: str


class KlState(TypedDict):
    value: float


class EntropyState(TypedDict, total=False):
    value: float
    active: bool


class HealthState(TypedDict):
    series: dict[str, tuple[list[float], list[float]]]  # metric -> first and latest values
    shown: list[str]


class GuardState(TypedDict, total=False):
    rollout_gate_breaches: int
    stale_gate_breaches: int


class BatchState(GuardState, total=False):
    kl_controller: KlState


class SamplingState(TypedDict, total=False):
    """Where sampling resumes."""

    data: Mapping[str, object] | None  # position in the data source
    waiting_groups: list[dict[str, object]] | None  # rows of `group_rows.waiting_to_rows`


class AheadRow(TypedDict):
    """A prefetched rollout."""

    step: int
    groups: list[dict[str, Any]]  # rows of `group_rows.groups_to_rows`
    metrics: dict[str, str]
    before: SamplingState


class SampledAhead(TypedDict):
    rollouts: list[AheadRow]
    behind: SamplingState


class TrainerState(SamplingState, total=False):
    """The content of trainer.json. `read_trainer_state` checks the keys that loading uses; older
    checkpoints lack some of the others."""

    step: int
    world_size: int
    layout: str
    networks: dict[str, SavedPart]
    fingerprints: list[dict[str, dict[str, str]]]  # [rank][network][part], see fingerprint.py
    has_rng: bool
    weights_only: bool
    model: dict[str, Any]  # settings of the network, by name
    tokenizer: dict[str, object]
    settings: dict[str, object]
    random_states: dict[str, str]
    evaluation_due: bool
    weight_version: int
    batches: BatchState
    health: HealthState | None
    metrics: dict[str, float]
    output_dir: str
    reference: str | None
    sampled_ahead: SampledAhead
    entropy_controller: EntropyState
    skipped_steps: int
    skipped_in_a_row: int
    critic_skipped_steps: int
    critic_skipped_in_a_row: int


_NETWORK = re.compile(r"[a-z_]{1,40}")  # network name, also the name of its folder


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2**63
        and math.isfinite(value)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_network(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("optimizer"), list)
        and all(map(_is_text, value["optimizer"]))
        and _is_number(value.get("optimizer_step"))
        and isinstance(value.get("scheduler"), dict | None)
        and isinstance(value.get("layout", ""), str)
    )


def _are_networks(value: object) -> bool:
    return isinstance(value, dict) and all(
        _NETWORK.fullmatch(name) and _is_network(network) for name, network in value.items()
    )


def _are_fingerprints(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(of_rank, dict) and all(map(_is_texts_by_name, of_rank.values()))
        for of_rank in value
    )


_REQUIRED: Mapping[str, Callable[[object], bool]] = {
    "step": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "layout": _is_text,
    "networks": _are_networks,
    "fingerprints": _are_fingerprints,
}
_OPTIONAL: Mapping[str, Callable[[object], bool]] = {
    "has_rng": lambda value: isinstance(value, bool),
    "weights_only": lambda value: isinstance(value, bool),
    "model": lambda value: isinstance(value, dict),
    "tokenizer": lambda value: isinstance(value, dict),
    "settings": lambda value: isinstance(value, dict),
    "random_states": _is_texts_by_name,
    "evaluation_due": lambda value: isinstance(value, bool),
}


def read_trainer_state(folder: Path) -> TrainerState:
    """Read the trainer state of a checkpoint.

    Args:
        folder: Folder of the checkpoint.

    Returns:
        The saved state; the types of the entries that loading uses are validated.

    Raises:
        ValueError: The file is missing or damaged; names the checkpoint and the problem.
    """
    try:
        state: TrainerState = read_json(folder / TRAINER_FILE, folder)
        entries: Mapping[str, object] = state
        if not isinstance(entries, dict):
            raise ValueError("not a trainer state")
        invalid = [name for name, valid in _REQUIRED.items() if not valid(entries.get(name))]
        invalid += [n for n, valid in _OPTIONAL.items() if n in entries and not valid(entries[n])]
        if invalid:
            raise ValueError(f"{invalid[0]!r} is missing or invalid")
        if len(state["fingerprints"]) != state["world_size"]:
            raise ValueError("'fingerprints' are not those of all ranks")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {folder}: {TRAINER_FILE} is missing or damaged ({error})"
        ) from error
    return state
