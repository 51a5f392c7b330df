"""A rollout on its way to train batches: its samples before and after delivery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from slime_like.batching.step_plan import DataParallelAssignment
from slime_like.guards.finite import check_finite
from slime_like.samples.episodes import complete, episodes_of
from slime_like.samples.index import AnySample
from slime_like.types import Sample, TrainSample

Columns = Mapping[str, Sequence[Tensor | None] | None]  # description -> [R] per sample


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout during batch building. "Local" samples are those that this rank trains on."""

    sampled: Sequence[AnySample]  # all samples, with tokens on the rank that generated them
    samples: Sequence[AnySample]  # the same, with tokens on the ranks that train on them
    assignment: DataParallelAssignment
    steps: list[list[TrainSample]]  # the local samples of each optimizer step

    @property
    def local(self) -> list[TrainSample]:
        """The local samples of all steps."""
        return list(chain.from_iterable(self.steps))

    @property
    def local_samples(self) -> list[Sample]:
        """The samples from which `local` was made."""
        return complete(self.samples[i] for i in self.assignment.local_indices)

    @property
    def local_keys(self) -> list[str]:
        """Names of the local samples in recordings: the id; for branches of an episode, the id and
        an index from 0."""
        counts = Counter[int]()
        keys = []
        for sample in self.samples:
            count = counts[sample.sample_id]
            counts[sample.sample_id] += 1
            keys.append(f"{sample.sample_id}.{count - 1}" if count else str(sample.sample_id))
        return [keys[i] for i in self.assignment.local_indices]

    @property
    def local_episodes(self) -> list[int]:
        """Index of the episode of each local sample."""
        of = episodes_of(self.samples).of
        return [of[i] for i in self.assignment.local_indices]

    @property
    def local_sequences(self) -> list[int]:
        """Index of each local sample within its episode."""
        episodes = episodes_of(self.samples)
        return [i - episodes.first[episodes.of[i]] for i in self.assignment.local_indices]

    @property
    def sampled_episodes(self) -> list[AnySample]:
        """The first sequence of each episode, held by the rank that generated it."""
        return [self.sampled[i] for i in episodes_of(self.sampled).first]

    @property
    def masks(self) -> list[Tensor]:
        return [sample.loss_mask for sample in self.local]

    def check_finite(self, columns: Columns, when: str) -> None:
        """See `slime_like.guards.finite.check_finite`."""
        names = [str(sample.sample_id) for sample in self.local_samples]
        check_finite(columns, self.masks, names, when=when)
