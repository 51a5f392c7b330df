"""Which groups are trained on: the dynamic filter while a rollout is collected, the filter of the
buffer, and the filter of samples."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from arguments.rules.scheduling import FILTERS
from slime_like.rollout.group_buffer import ChooseWaiting, oldest_first
from slime_like.sample_index import AnySample
from slime_like.types import SampleGroup

DYNAMIC_FILTER = "--dynamic-sampling-filter-path"
NO_SPREAD = 1e-6  # standard deviation of rewards up to which a group has no advantage


@dataclass(slots=True)
class DynamicFilterOutput:
    """keep: whether the group is trained on. reason: why not, in few words; it becomes part of a
    metric's name. keep_when_insufficient: keep it when dropping it would need another draw."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


KeepGroup = Callable[[Sequence[AnySample]], DynamicFilterOutput]


@dataclass(frozen=True, slots=True)
class GroupFilters:
    """The filters of a run; the default keeps every group and sample.

    keep_group: the dynamic filter, for one graded group. choose_waiting: which groups of the
    buffer continue. removed_samples: ids of samples that count in their group's advantages and are
    not trained on.
    """

    keep_group: KeepGroup | None = None
    choose_waiting: ChooseWaiting = oldest_first
    removed_samples: Callable[[Sequence[SampleGroup]], Collection[int]] | None = None


def check_reward_nonzero_std(samples: Sequence[AnySample]) -> DynamicFilterOutput:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a group whose rewards are all equal
    has no advantage and is dropped. Rewards that are missing or not finite do not count."""
    finite = [s.reward for s in samples if s.reward is not None and math.isfinite(s.reward)]
    if not finite:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    keep = statistics.pstdev(finite) > NO_SPREAD
    return DynamicFilterOutput(
        keep=keep, reason=None if keep else f"zero_std_{round(finite[0], 1):g}"
    )


def check_reward_nonzero_std_with_fallback(samples: Sequence[AnySample]) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, without another draw of prompts for the groups it drops."""
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
        is_spare: Without this group, as many as the rollout needs are still in progress.
    """
    output = keep_group(samples)
    if output.keep or (output.keep_when_insufficient and not is_spare):
        return True
    dropped[output.reason or "dropped"] += 1
    return False
