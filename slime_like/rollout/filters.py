"""Which groups are kept: the dynamic filter while a rollout is collected, the filters of the buffer
and of samples. Called as slime's are."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arguments.rules.scheduling import FILTERS
from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, to_slime_groups
from slime_like.import_utils import load_function
from slime_like.rollout.group_buffer import PendingGroup

DYNAMIC_FILTER = "--dynamic-sampling-filter-path"
NO_SPREAD = 1e-6  # standard deviation of rewards up to which a group teaches nothing


@dataclass(slots=True)
class DynamicFilterOutput:
    """keep: whether the group is trained on. reason: why not, in few words; it becomes part of a
    metric's name. keep_when_insufficient: rather keep it than draw more prompts for it."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(
    args: Any, samples: Sequence[SlimeSample], **more: Any
) -> DynamicFilterOutput:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a group whose rewards are all equal
    has no advantage and is left out. Rewards that are missing or not finite do not count."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    finite = [float(r) for r in rewards if r is not None and math.isfinite(r)]
    if not finite:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    keep = statistics.pstdev(finite) > NO_SPREAD
    return DynamicFilterOutput(
        keep=keep, reason=None if keep else f"zero_std_{round(finite[0], 1):g}"
    )


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[SlimeSample], **more: Any
) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, without drawing more prompts than were drawn anyway."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


BUILT_IN = dict(
    zip(FILTERS, (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback), strict=True)
)


def dynamic_filter(path: str) -> Callable[..., Any]:
    """The function behind --dynamic-sampling-filter-path. Raises ValueError naming the flag."""
    return BUILT_IN[path] if path in BUILT_IN else load_function(path, DYNAMIC_FILTER)


class DynamicFilter:
    """A user's filter over the groups of one rollout, and what it dropped, by reason. path None
    keeps every group."""

    def __init__(self, path: str | None, args: SlimeArgs) -> None:
        self.path = path
        self.dropped: Counter[str] = Counter()
        self._function = None if path is None else dynamic_filter(path)
        self._args = args

    def keeps(self, group: list[SlimeSample], *, is_spare: bool) -> bool:
        """is_spare: without this group there are still as many under way as the rollout needs."""
        if self._function is None:
            return True
        verdict = self._verdict(group)
        if verdict.keep or (verdict.keep_when_insufficient and not is_spare):
            return True
        self.dropped[verdict.reason or "dropped"] += 1
        return False

    def _verdict(self, group: list[SlimeSample]) -> DynamicFilterOutput:
        assert self._function is not None
        place = f"{DYNAMIC_FILTER} {self.path}: group {group[0].group_index}"
        try:
            output = self._function(self._args, group)
        except Exception as error:
            raise ValueError(
                f"{place}: the function raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(output, bool):
            return DynamicFilterOutput(keep=output)
        keep = getattr(output, "keep", None)
        if keep is None or getattr(keep, "shape", ()) != ():
            raise ValueError(
                f"{place}: the function returned {type(output).__name__}; return True, False or a DynamicFilterOutput(keep, reason)"
            )
        return DynamicFilterOutput(
            bool(keep),
            getattr(output, "reason", None),
            bool(getattr(output, "keep_when_insufficient", False)),
        )


def pop_first(
    args: Any, rollout_id: Any, buffer: list[list[SlimeSample]], num_samples: int
) -> list[list[SlimeSample]]:
    """The default filter of the buffer: the groups that have waited longest."""
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken


@dataclass(frozen=True, slots=True)
class Taken:
    """Group ids: those to go on with, and those that the filter threw away."""

    chosen: list[int]
    discarded: list[int]


def take_from_buffer(
    path: str | None, args: SlimeArgs, rollout_id: int, buffer: list[list[SlimeSample]], count: int
) -> Taken:
    """Ask --buffer-filter-path for at most `count` groups. It takes those that it returns out of
    the list; what else it takes out is gone."""
    before = [_number(group[0].group_index) for group in buffer]
    chosen = (pop_first if path is None else load_function(path, "--buffer-filter-path"))(
        args, rollout_id, buffer, count
    )
    ids = [_number(group[0].group_index) for group in chosen]
    if len(ids) > count or len(set(ids)) < len(ids) or not set(ids) <= set(before):
        raise ValueError(
            f"--buffer-filter-path {path}: was asked for at most {count} of the groups {before} and returned {ids}"
        )
    left = {group[0].group_index for group in buffer} - set(ids)
    return Taken(ids, [i for i in before if i not in left and i not in ids])


def choose_waiting(
    path: str | None, args: SlimeArgs, rollout_id: int, waiting: Sequence[PendingGroup], count: int
) -> tuple[list[int], list[int]]:
    """Of the groups that wait: ids of at most `count` to go on with, and of those to throw away."""
    taken = take_from_buffer(
        path, args, rollout_id, to_slime_groups(g.samples for g in waiting), count
    )
    return taken.chosen, taken.discarded


def samples_to_remove(
    path: str | None, args: SlimeArgs, groups: list[list[SlimeSample]]
) -> list[int]:
    """Ids of the samples whose `remove_sample` --rollout-sample-filter-path sets."""
    if path is None:
        return []
    load_function(path, "--rollout-sample-filter-path")(args, groups)
    return [_number(sample.index) for group in groups for sample in group if sample.remove_sample]


def _number(index: int | None) -> int:
    assert index is not None, "samples of the run are numbered"
    return index
