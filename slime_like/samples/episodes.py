"""Episodes of a rollout: consecutive samples with the same id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_like.lazy import Tensor, torch
from slime_like.types import Sample, SampleStatus

if TYPE_CHECKING:
    from slime_like.samples.index import AnySample


def complete(samples: Iterable[AnySample]) -> list[Sample]:
    """The same samples, asserting that this rank holds all of them."""
    local = []
    for sample in samples:
        assert isinstance(sample, Sample), f"sample {sample.sample_id} is on another rank"
        local.append(sample)
    return local


@dataclass(frozen=True, slots=True)
class Episodes:
    """Episodes of a list of samples: runs of samples with equal id."""

    first: Sequence[int]  # index of each episode's first sample
    of: Sequence[int]  # the episode of each sample

    @property
    def one_each(self) -> bool:
        return len(self.first) == len(self.of)

    def sums(self, counts: Sequence[int]) -> Tensor:
        """Sum per-sample `counts` over the samples of each episode: [episodes] int64."""
        sums = torch.zeros(len(self.first), dtype=torch.int64)
        return sums.index_add(0, torch.tensor(self.of), torch.tensor(counts, dtype=torch.int64))


def episodes_of(samples: Sequence[AnySample]) -> Episodes:
    """The episodes of a rollout, or of one optimizer step."""
    first: list[int] = []
    of = []
    for i, sample in enumerate(samples):
        if i == 0 or samples[i - 1].sample_id != sample.sample_id:
            first.append(i)
        of.append(len(first) - 1)
    return Episodes(first, of)


def truncated_fraction(samples: Sequence[AnySample]) -> float:
    """Fraction of samples that reached the length limit."""
    return sum(s.status == SampleStatus.TRUNCATED for s in samples) / len(samples)
