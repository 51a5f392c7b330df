"""Filters that decide what is trained on: dynamic sampling filter, buffer filter and sample
filter."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from arguments.rules.scheduling import FILTERS
from slime_like.data.group_buffer import ChooseWaiting, oldest_first
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import AnySample

DYNAMIC_FILTER = "--dynamic-sampling-filter-path"
NO_SPREAD = 1e-6  # reward standard deviation up to which a group gives no advantage


@dataclass(slots=True)
class DynamicFilterOutput:
    """Result of the dynamic filter."""

    keep: bool  # whether to keep the group
    reason: str | None = None  # short reason for dropping, used in metric names
    # keep the group if dropping it would need another draw of prompts
    keep_when_insufficient: bool = False


KeepGroup = Callable[[Sequence[AnySample]], DynamicFilterOutput]


@dataclass(frozen=True, slots=True)
class GroupFilters:
    """The filters of a run; the default keeps every group and sample."""

    keep_group: KeepGroup | None = None  # dynamic filter of one graded group
    choose_waiting: ChooseWaiting = oldest_first  # selects groups from the buffer
    # ids of samples that count in their group's advantages but are not trained on
    removed_samples: Callable[[Sequence[SampleGroup]], Collection[int]] | None = None


def check_reward_nonzero_std(samples: Sequence[AnySample]) -> DynamicFilterOutput:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a group whose rewards are all equal
    has no advantage and is dropped. Rewards that are missing or not finite do not count."""
    return nonzero_std([s.reward for s in samples if s.reward is not None])


def nonzero_std(rewards: Sequence[float]) -> DynamicFilterOutput:
    """`check_reward_nonzero_std` of rewards."""
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if not finite:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    keep = statistics.pstdev(finite) > NO_SPREAD
    return DynamicFilterOutput(
        keep=keep, reason=None if keep else f"zero_std_{round(finite[0], 1):g}"
    )


def check_reward_nonzero_std_with_fallback(samples: Sequence[AnySample]) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but never causes another draw of prompts."""
    output = check_reward_nonzero_std(samples)
    output.keep_when_insufficient = True
    return output


BUILT_IN_FILTERS: dict[str, KeepGroup] = dict(
    zip(FILTERS, (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback), strict=True)
)


def is_kept(
    keep_group: KeepGroup, samples: Sequence[AnySample], dropped: Counter[str], *, is_spare: bool
) -> bool:
    """Whether the dynamic filter keeps a graded group.

    Args:
        keep_group: The filter.
        samples: The group's.
        dropped: Groups by reason; a dropped one is counted here.
        is_spare: Enough other groups are in progress.
    """
    output = keep_group(samples)
    if output.keep or (output.keep_when_insufficient and not is_spare):
        return True
    dropped[output.reason or "dropped"] += 1
    return False
