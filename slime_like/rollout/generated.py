"""What sampling hands to training: one rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_like.samples.groups import SampleGroup, flatten
from slime_like.samples.index import AnySample
from slime_like.samples.masking import mask_failed


@dataclass(frozen=True, slots=True)
class GeneratedRollout:
    """A rollout, sampled now or ahead of training, recorded, or supervised.

    Masking is decided here, once, so that a prefetched rollout is delivered to the ranks that train
    on it as the same objects that the trainer gets.
    """

    groups: Sequence[SampleGroup]  # as sampled, for recordings and checkpoints
    metrics: Mapping[str, float]  # of their collection
    samples: Sequence[AnySample]  # of all groups, in order; failed ones are masked out

    @classmethod
    def of(cls, groups: Sequence[SampleGroup], metrics: Mapping[str, float]) -> GeneratedRollout:
        return cls(groups, metrics, [mask_failed(sample) for sample in flatten(groups)])
