"""Groups of samples that wait to be generated or completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slime_like.data.prompts import PromptStream
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import AnySample, awaits_reward
from slime_like.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A prompt and its samples, or some of them (--fully-async-single-samples); some may be
    unfinished, and some may be on other ranks."""

    prompt: Prompt
    samples: tuple[AnySample, ...]
    started: int | None = None  # --fully-async: the rollout that was trained when it started

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    @property
    def key(self) -> tuple[int, int]:
        """Different for every group, and for every part of one. Sorts by group."""
        return self.group_id, self.samples[0].sample_id

    @property
    def sample_group(self) -> SampleGroup:
        return SampleGroup(self.group_id, self.samples)

    @property
    def ended(self) -> bool:
        return all(sample.ended for sample in self.samples)

    @property
    def is_graded(self) -> bool:
        """Whether no finished sample waits for its reward."""
        return not any(awaits_reward(sample) for sample in self.samples)

    @property
    def response_tokens(self) -> int:
        return sum(sample.response_length for sample in self.samples)

    def with_samples(self, samples: Iterable[AnySample]) -> PendingGroup:
        """A copy with these samples."""
        return replace(self, samples=tuple(samples))

    def emptied(self) -> PendingGroup:
        """The same samples, not begun."""
        samples = (Sample.empty(self.prompt, sample.sample_id) for sample in self.samples)
        return PendingGroup(self.prompt, tuple(samples))


def apart(groups: Iterable[PendingGroup]) -> list[PendingGroup]:
    """Each sample of the groups alone."""
    return [group.with_samples([sample]) for group in groups for sample in group.samples]


def joined(
    groups: Iterable[PendingGroup], same: Callable[[PendingGroup], object]
) -> list[PendingGroup]:
    """The groups, those of one prompt that follow each other as one if `same` is equal."""
    result = list[PendingGroup]()
    for group in groups:
        last = result[-1] if result else None
        if last is not None and last.group_id == group.group_id and same(last) == same(group):
            result[-1] = last.with_samples([*last.samples, *group.samples])
        else:
            result.append(group)
    return result


# (waiting groups, count) -> ids of at most `count` groups to continue, ids of groups to discard
Choose = Callable[[Sequence[PendingGroup], int], tuple[list[int], list[int]]]


# buffer filter: (rollout id, waiting groups, count) -> the same
ChooseWaiting = Callable[[int, Sequence[PendingGroup], int], tuple[list[int], list[int]]]


def oldest_first(
    rollout_id: int, waiting: Sequence[PendingGroup], count: int
) -> tuple[list[int], list[int]]:
    """The default `ChooseWaiting`: the groups that have waited longest."""
    return [group.group_id for group in waiting[:count]], []


class GroupBuffer:
    """Provides groups to sample: unfinished ones selected by `choose`, then new prompts with
    n_samples empty samples each. rank: this rank, out of num_holders that sample."""

    def __init__(
        self, source: PromptStream, n_samples: int, *, rank: int = 0, num_holders: int = 1
    ) -> None:
        self.source = source
        self.n_samples = n_samples
        self.rank = rank
        self.num_holders = num_holders
        self.waiting: list[PendingGroup] = []

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]:
        """Draw groups.

        Args:
            count: Number of groups.
            choose: Selects waiting groups to continue and to discard.

        Returns:
            `count` groups to sample, and the discarded ones.
        """
        chosen, discarded = choose(self.waiting, count) if self.waiting else ([], [])
        by_id = {group.group_id: group for group in self.waiting}
        self.waiting = [
            group for group in self.waiting if group.group_id not in {*chosen, *discarded}
        ]
        groups = [by_id[i] for i in chosen]
        new = self.source.next_prompts(count - len(groups)) if len(groups) < count else []
        groups += [self.empty_group(prompt) for prompt in new]
        return groups, [by_id[i] for i in discarded]

    def empty_group(self, prompt: Prompt) -> PendingGroup:
        """A new group of empty samples for a prompt."""
        first = prompt.group_id * self.n_samples
        samples = (Sample.empty(prompt, first + j) for j in range(self.n_samples))
        return PendingGroup(prompt, tuple(samples))

    def fits(self, group_id: int, samples: Sequence[AnySample]) -> bool:
        """Whether these are all samples of a group of this run. An episode may be several."""
        first = group_id * self.n_samples
        ids = {sample.sample_id for sample in samples}
        return ids == set(range(first, first + self.n_samples))

    def whole(self, groups: Iterable[PendingGroup]) -> tuple[list[PendingGroup], int]:
        """The same groups, those of which there are parts whole again, and how many of them begin
        again, because samples are missing or are too many."""
        parts: dict[int, list[PendingGroup]] = {}
        for group in groups:
            parts.setdefault(group.group_id, []).append(group)
        again = 0
        result = list[PendingGroup]()
        for same in parts.values():
            samples = [sample for part in same for sample in part.samples]
            if not self.fits(same[0].group_id, samples):
                result.append(self.empty_group(same[0].prompt))
                again += 1
                continue
            samples.sort(key=lambda sample: sample.sample_id)
            starts = [part.started for part in same if part.started is not None]
            started = min(starts, default=None)
            result.append(replace(same[0], samples=tuple(samples), started=started))
        return result, again

    def observe(self, groups: Iterable[PendingGroup]) -> None:
        """Graded groups that are trained on or dropped: the source may learn from them."""
        for group in groups:
            self.source.observe(group.prompt, [sample.reward for sample in group.samples])

    def metrics(self) -> dict[str, float]:
        """Of the source."""
        return self.source.metrics()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def requeue(self, groups: Sequence[PendingGroup]) -> None:
        """Return groups to the buffer, for the next `take`."""
        self.waiting += groups
