"""What every part of making train batches reads: the settings, and the rollout as it is shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from arguments.schema import AlgorithmConfig
from slime_like.advantages import AdvantageSettings
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.rollout.step_plan import DataParallelAssignment
from slime_like.sample_index import AnySample, complete, episodes_of
from slime_like.trainer.guards import check_finite
from slime_like.trainer.user_hooks import UserHooks
from slime_like.types import Sample, TrainSample

Columns = Mapping[str, Sequence[Tensor | None] | None]  # what it is -> [R] by sample


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """transformer: megatron-core's TransformerConfig of the policy. replays_rollout: the sampler's
    experts are replayed. served_teacher: the samples have a teacher's log-probs. old_is_current: see
    `TrainBatch`. outcome_fields: what `Outcomes` has of a rollout's samples that is not in their
    rows; a collective."""

    algorithm: AlgorithmConfig
    off_policy: OffPolicyConfig
    transformer: Any
    vocab_size: int
    replays_rollout: bool
    served_teacher: bool
    advantages: AdvantageSettings
    sample_buffer_size: int
    old_is_current: bool
    outcome_fields: Callable[[Sequence[AnySample]], Mapping[str, Any]]
    hooks: UserHooks


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout that is about to become batches. sampled: all samples, each whole where it was
    made. samples: the same, each where it is trained on. local: this rank's, over all steps."""

    sampled: Sequence[AnySample]
    samples: Sequence[AnySample]
    shares: DataParallelAssignment
    steps: list[list[TrainSample]]

    @property
    def local(self) -> list[TrainSample]:
        return [sample for step in self.steps for sample in step]

    @property
    def drawn(self) -> list[Sample]:
        """This rank's, as they were sampled."""
        return complete(self.samples[i] for i in self.shares.local_indices)

    @property
    def local_keys(self) -> list[str]:
        """Names of this rank's samples in recordings: the id, and for the branches of an episode,
        which follow it, the id and a number from 0."""
        seen: Counter[int] = Counter()
        keys = []
        for sample in self.samples:
            count, seen[sample.sample_id] = seen[sample.sample_id], seen[sample.sample_id] + 1
            keys.append(f"{sample.sample_id}.{count - 1}" if count else str(sample.sample_id))
        return [keys[i] for i in self.shares.local_indices]

    @property
    def local_episodes(self) -> list[int]:
        """Of this rank's samples: the episode of each, among all of the rollout."""
        of = episodes_of(self.samples).of
        return [of[i] for i in self.shares.local_indices]

    @property
    def local_sequences(self) -> list[int]:
        """Of this rank's samples: the place of each among the sequences of its episode."""
        episodes = episodes_of(self.samples)
        return [i - episodes.first[episodes.of[i]] for i in self.shares.local_indices]

    @property
    def sampled_episodes(self) -> list[AnySample]:
        """The first sequence of each episode, as it was sampled."""
        return [self.sampled[i] for i in episodes_of(self.sampled).first]

    @property
    def masks(self) -> list[Tensor]:
        return [sample.loss_mask for sample in self.local]

    def check_finite(self, columns: Columns, when: str) -> None:
        """See `guards.check_finite`."""
        names = [str(sample.sample_id) for sample in self.drawn]
        check_finite(columns, self.masks, names, when=when)
