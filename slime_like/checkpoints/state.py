"""trainer.json of a checkpoint: everything except tensors. Validated here for all readers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Required,  # typing's has no Required that pydantic reads
)

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from slime_like.checked_json import problems_of
from slime_like.checkpoints.files import read_json

TRAINER_FILE = "trainer.json"
Count = Annotated[int, Field(ge=0, lt=2**63)]
NetworkName = Annotated[str, Field(pattern="^[a-z_]{1,40}$")]  # also the name of its folder


class SavedPart(TypedDict, total=False):
    """Description of one saved network."""

    optimizer: Required[list[str]]
    optimizer_step: Required[Annotated[float, Field(gt=-(2**63), lt=2**63)]]
    scheduler: dict[str, object] | None
    layout: str
    loss_scale: Annotated[list[float], Field(min_length=3, max_length=3)] | None  # of fp16


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


class LoadedState(TypedDict, total=False):
    """The keys that loading uses."""

    step: Count
    world_size: Annotated[int, Field(ge=1)]
    layout: str
    networks: dict[NetworkName, SavedPart]
    # [rank][network][part], see fingerprint.py
    fingerprints: list[dict[str, dict[str, str]]]
    has_rng: bool
    weights_only: bool
    model: dict[str, Any]  # settings of the network, by name
    tokenizer: dict[str, object]
    settings: dict[str, object]
    random_states: dict[str, str]
    evaluation_due: bool


class TrainerState(LoadedState, SamplingState, total=False):
    """The content of trainer.json. Older checkpoints lack some keys."""

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


_LOADED = TypeAdapter(LoadedState)
REQUIRED = ("step", "world_size", "layout", "networks", "fingerprints")


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
        # of any size: rollouts sampled ahead are in it, and the manifest has its size
        state: TrainerState = read_json(folder / TRAINER_FILE, folder, limit=None)
        _LOADED.validate_python(state, strict=True)
        for name in REQUIRED:
            if name not in state:
                raise ValueError(f"{name!r} is missing")
        if len(state["fingerprints"]) != state["world_size"]:
            raise ValueError("'fingerprints' are not those of all ranks")
    except (OSError, ValueError) as error:
        reason = problems_of(error)[0] if isinstance(error, ValidationError) else error
        raise ValueError(
            f"checkpoint {folder}: {TRAINER_FILE} is missing or damaged ({reason})"
        ) from error
    return state
