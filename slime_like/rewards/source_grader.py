"""Rewards of a prompt mix: each sample is graded by the reward of its prompt's source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.rewards.grader import Grader
from slime_like.types import PROMPT_SOURCE, Sample


class SourceGrader(Grader):
    """A `Grader` with other graders for the samples of some sources.

    Args:
        by_source: Graders by the source's name; samples of other sources, and without one, get the
            run's reward.
        settings: Of the run's reward, as of `Grader`.
    """

    def __init__(self, by_source: Mapping[str, Grader], **settings: Any) -> None:
        super().__init__(**settings)
        self._by_source = by_source

    def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """See `Grader`; the sources are graded one after the other."""
        places: dict[str | None, list[int]] = {}
        for place, sample in enumerate(samples):
            origin = sample.metadata.get(PROMPT_SOURCE)
            name = origin["name"] if isinstance(origin, Mapping) else None
            places.setdefault(name if name in self._by_source else None, []).append(place)
        graded = dict(zip(places.get(None, []), super().grade(_at(samples, places.get(None, [])))))
        counts = Counter(self.last_counts)
        for name, indices in places.items():
            if name is None:
                continue
            grader = self._by_source[name]
            graded.update(zip(indices, grader.grade(_at(samples, indices)), strict=True))
            counts.update(grader.last_counts)
            self.last_failure = self.last_failure or grader.last_failure
            self.last_nonfinite = self.last_nonfinite or grader.last_nonfinite
        self.last_counts = counts
        return [graded[place] for place in range(len(samples))]

    def close(self) -> None:
        """See `Grader`."""
        super().close()
        for grader in self._by_source.values():
            grader.close()


def _at(samples: Sequence[Sample], places: Sequence[int]) -> list[Sample]:
    return [samples[place] for place in places]
