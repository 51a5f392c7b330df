"""What all ranks know of every sample of a rollout, while its tokens are where they were sampled.

A sample is a `Sample` on the rank that has it, and a `RemoteSample` on the others: a row of an
array. Both have lengths, active tokens, reward, status, weight versions and which tensors there
are, under the same names, so that whatever needs no tokens is written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slime_like.lazy import torch
from slime_like.types import GREEDY_REWARD, OPTIONAL_TENSORS, Sample, SampleStatus

TRUNCATED_FRACTION = "rollout/truncated_frac"
# share of the trained tokens that no weights of the run are known to have written
UNKNOWN_VERSIONS = "rollout/unknown_version_frac"
ROW = np.dtype(
    [
        ("sample_id", "i8"),
        ("group_id", "i8"),
        ("reward", "f8"),  # NaN where `parts` says that there is none
        ("greedy_reward", "f8"),
        ("holder", "i4"),  # rank that has the sample
        ("total_length", "i4"),
        ("response_length", "i4"),
        ("active_tokens", "i4"),
        ("num_versions", "i4"),  # different weights that wrote the response
        ("version", "i4"),  # of the oldest of them
        ("version_tokens", "i4"),  # tokens that it wrote
        ("branches", "i4"),  # further sequences of the same episode
        ("versions_length", "i4"),  # entries of `weight_versions`, 0 or the length of the response
        ("set_width", "i4"),  # K of the token sets
        ("teacher_prompt_length", "i4"),
        ("route_layers", "i2"),
        ("route_topk", "i2"),
        ("status", "u1"),
        ("parts", "u1"),  # bits: which tensors there are, then which rewards
    ]
)
_STATUS = list(SampleStatus)
_BITS = {name: 1 << place for place, name in enumerate(OPTIONAL_TENSORS)}
_HAS_REWARD, _HAS_GREEDY = 1 << 6, 1 << 7
Rows: TypeAlias = NDArray[np.void]
Versions: TypeAlias = NDArray[np.int32]  # [n, 2]: version and tokens, of samples with several


class RemoteSample:
    """A sample that another rank has. Its properties are those of a `Sample`."""

    __slots__ = ("_place", "_rows", "_versions")

    def __init__(self, rows: Rows, place: int, versions: Versions | None = None) -> None:
        """rows: of dtype `ROW`. place: of this sample. versions: its own, where it has several."""
        self._rows, self._place, self._versions = rows, place, versions

    def _of(self, name: str) -> Any:
        return self._rows[name][self._place].item()

    @property
    def sample_id(self) -> int:
        return int(self._of("sample_id"))

    @property
    def group_id(self) -> int:
        return int(self._of("group_id"))

    @property
    def holder(self) -> int:
        """The rank that has it."""
        return int(self._of("holder"))

    @property
    def total_length(self) -> int:
        return int(self._of("total_length"))

    @property
    def response_length(self) -> int:
        return int(self._of("response_length"))

    @property
    def prompt_length(self) -> int:
        return self.total_length - self.response_length

    @property
    def active_tokens(self) -> int:
        return int(self._of("active_tokens"))

    @property
    def reward(self) -> float | None:
        return float(self._of("reward")) if self._of("parts") & _HAS_REWARD else None

    @property
    def greedy_reward(self) -> float | None:
        return float(self._of("greedy_reward")) if self._of("parts") & _HAS_GREEDY else None

    @property
    def status(self) -> SampleStatus:
        return _STATUS[self._of("status")]

    @property
    def ended(self) -> bool:
        return self.status != SampleStatus.PARTIAL

    @property
    def version_counts(self) -> Mapping[int, int]:
        if self._versions is not None:
            return dict(self._versions.tolist())
        known = self._of("num_versions") > 0
        return {self._of("version"): self._of("version_tokens")} if known else {}

    @property
    def versions_length(self) -> int:
        return int(self._of("versions_length"))

    @property
    def num_branches(self) -> int:
        return int(self._of("branches"))

    def has(self, name: str) -> bool:
        return bool(self._of("parts") & _BITS[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that there is."""
        if name == "token_sets":
            return (self.response_length, int(self._of("set_width")))
        if name == "routes":
            layers, topk = int(self._of("route_layers")), int(self._of("route_topk"))
            return (self.total_length, layers, topk)
        if name == "teacher_prompt":
            return (int(self._of("teacher_prompt_length")),)
        return (self.response_length,)

    def without(self, name: str) -> RemoteSample:
        """Without one of the tensors."""
        return self._changed(parts=self._of("parts") & ~_BITS[name])

    def untrained(self) -> RemoteSample:
        """With an empty loss mask."""
        return self._changed(active_tokens=0)

    def with_reward(self, reward: float) -> RemoteSample:
        return self._changed(reward=reward, parts=self._of("parts") | _HAS_REWARD)

    def with_greedy_reward(self, reward: float) -> RemoteSample:
        return self._changed(greedy_reward=reward, parts=self._of("parts") | _HAS_GREEDY)

    def _changed(self, **values: object) -> RemoteSample:
        rows = self._rows[self._place : self._place + 1].copy()
        for name, value in values.items():
            rows[name] = value
        return RemoteSample(rows, 0, self._versions)


AnySample: TypeAlias = Sample | RemoteSample


def complete(samples: Iterable[AnySample]) -> list[Sample]:
    """The same samples, where this rank has all of them."""
    found = list(samples)
    remote = [s.sample_id for s in found if isinstance(s, RemoteSample)]
    assert not remote, f"samples {remote[:3]} are on other ranks"
    return [s for s in found if isinstance(s, Sample)]


def untrained(sample: AnySample) -> AnySample:
    """With an empty loss mask."""
    if isinstance(sample, RemoteSample):
        return sample.untrained()
    return replace(
        sample,
        loss_mask=torch.zeros_like(sample.loss_mask),
        branches=tuple(
            replace(b, loss_mask=torch.zeros_like(b.loss_mask)) for b in sample.branches
        ),
    )


@dataclass(frozen=True, slots=True)
class Episodes:
    """Samples in a row that have one id are the sequences of one episode. first: the place of each
    episode's first one; of: by sample, its episode."""

    first: Sequence[int]
    of: Sequence[int]

    @property
    def one_each(self) -> bool:
        return len(self.first) == len(self.of)


def episodes_of(samples: Sequence[AnySample]) -> Episodes:
    """The episodes of a rollout, or of one optimizer step."""
    first: list[int] = []
    of = []
    for place, sample in enumerate(samples):
        if not place or samples[place - 1].sample_id != sample.sample_id:
            first.append(place)
        of.append(len(first) - 1)
    return Episodes(first, of)


def holder_of(sample: AnySample, rank: int) -> int:
    """The rank that has it, as `rank` sees it."""
    return sample.holder if isinstance(sample, RemoteSample) else rank


def rows_of(samples: Sequence[Sample], holder: int) -> tuple[Rows, Versions]:
    """What other ranks get to know of samples that `holder` has: rows, and the weight versions of
    those samples that have several, one after the other."""
    rows = np.zeros(len(samples), dtype=ROW)
    several: list[tuple[int, int]] = []
    for row, sample in zip(rows, samples):
        versions = sorted(sample.version_counts.items())
        oldest = versions[0] if versions else (0, 0)
        if len(versions) > 1:
            several += versions
        parts = sum(bit for name, bit in _BITS.items() if sample.has(name))
        parts |= _HAS_REWARD * (sample.reward is not None)
        greedy = sample.greedy_reward
        parts |= _HAS_GREEDY * (greedy is not None)
        routes = (0, 0, 0) if sample.routes is None else tuple(sample.routes.shape)
        row["sample_id"], row["group_id"] = sample.sample_id, sample.group_id
        row["reward"] = math.nan if sample.reward is None else sample.reward
        row["greedy_reward"] = math.nan if greedy is None else greedy
        row["holder"], row["total_length"] = holder, sample.total_length
        row["response_length"] = sample.response_length
        row["active_tokens"] = sample.active_tokens
        row["num_versions"] = len(versions)
        row["version"], row["version_tokens"] = oldest
        row["versions_length"] = sample.versions_length
        row["branches"] = sample.num_branches
        row["set_width"] = 0 if sample.token_sets is None else sample.token_sets.shape[1]
        taught = sample.teacher_prompt
        row["teacher_prompt_length"] = 0 if taught is None else taught.numel()
        row["route_layers"], row["route_topk"] = routes[1:]
        row["status"], row["parts"] = _STATUS.index(sample.status), parts
    return rows, np.array(several, dtype=np.int32).reshape(-1, 2)


def num_several(rows: Rows) -> int:
    """How long the second array of `rows_of` is."""
    counts = rows["num_versions"]
    return int(counts[counts > 1].sum())


def remote_samples(rows: Rows, versions: Versions) -> list[RemoteSample]:
    """The inverse of `rows_of`."""
    counts = rows["num_versions"]
    ends = np.where(counts > 1, counts, 0).cumsum()
    return [
        RemoteSample(rows, place, versions[end - count : end] if count > 1 else None)
        for place, (count, end) in enumerate(zip(counts.tolist(), ends.tolist()))
    ]


def greedy_metadata(sample: RemoteSample) -> dict[str, object]:
    """What of a sample's metadata travels with it."""
    greedy = sample.greedy_reward
    return {} if greedy is None else {GREEDY_REWARD: greedy}


def truncated_fraction(samples: Sequence[AnySample]) -> float:
    """Share of samples that reached the limit of length."""
    return sum(s.status == SampleStatus.TRUNCATED for s in samples) / len(samples)
