"""Samples and settings as slime's users know them: what functions named on the command line are
called with.

`SlimeSample` has the attributes of slime's ``Sample`` that mean something here, under the same
names. A function may change it; what it
changed is read back by its caller, and checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from arguments.run_config import RunConfig
from slime_like.rollout.engines.base import GenerateOutput
from slime_like.types import Prompt, Sample, SampleStatus


@dataclass(slots=True)
class SlimeSample:
    """tokens: prompt and response. loss_mask and rollout_log_probs have an entry for each response
    token. loss_mask None: all ones. weight_versions: of the requests that wrote it, as numbers or
    text. written: what the engine wrote, in order; ours, not to be changed."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[int | str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    written: list[GenerateOutput] = field(default_factory=list, repr=False, compare=False)

    def get_reward_value(self, args: Any) -> Any:
        """The number to train on, of a reward that may be a dict."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


class SlimeArgs:
    """The settings of the run by the names of their flags, read-only."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"args has no {name!r}: it is no setting of this run") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name}: the settings of a run do not change")


def slime_args(run: RunConfig) -> SlimeArgs:
    """All of our own settings, and those of --custom-arguments-path; megatron-core's are not here."""
    groups = (
        run.model,
        run.data,
        run.eval,
        run.rollout,
        run.scheduling,
        run.reward,
        run.algorithm,
        run.checkpoint,
        run.logging,
        run.debug,
    )
    ours = {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}
    return SlimeArgs({**ours, **run.custom})


_STATUS = {
    SampleStatus.COMPLETED: SlimeSample.Status.COMPLETED,
    SampleStatus.TRUNCATED: SlimeSample.Status.TRUNCATED,
    SampleStatus.FAILED: SlimeSample.Status.FAILED,
}


def to_slime(sample: Sample) -> SlimeSample:
    """A sample that is unfinished is PENDING before its first token, and ABORTED after it, as in
    slime."""
    unfinished = (
        SlimeSample.Status.ABORTED if sample.response_length else SlimeSample.Status.PENDING
    )
    told = sample.rollout_log_probs
    return SlimeSample(
        group_index=sample.group_id,
        index=sample.sample_id,
        prompt=sample.text,
        tokens=sample.tokens.tolist() if sample.response_length else [],
        response=sample.response,
        response_length=sample.response_length,
        label=sample.label,
        reward=sample.reward,
        loss_mask=sample.loss_mask.int().tolist() if sample.response_length else None,
        weight_versions=sorted(set(sample.weight_versions)),
        rollout_log_probs=None if told is None or not sample.response_length else told.tolist(),
        status=_STATUS.get(sample.status, unfinished),
        metadata=dict(sample.metadata),
    )


def to_slime_groups(groups: Iterable[Iterable[Sample]]) -> list[list[SlimeSample]]:
    return [[to_slime(sample) for sample in group] for group in groups]


def unwritten(prompt: Prompt, sample_id: int) -> Sample:
    """A sample before its first token."""
    return Sample(
        group_id=prompt.group_id,
        sample_id=sample_id,
        tokens=torch.tensor(prompt.tokens, dtype=torch.int64),
        response_length=0,
        loss_mask=torch.empty(0, dtype=torch.bool),
        rollout_log_probs=torch.empty(0, dtype=torch.float32),
        status=SampleStatus.PARTIAL,
        text=prompt.text,
        label=prompt.label,
        metadata=prompt.metadata,
    )
