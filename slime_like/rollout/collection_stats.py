"""Counts of how a rollout's groups were found: what the metrics tell of them, and the message when
they are too few."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slime_like.rollout.filters import DYNAMIC_FILTER, DynamicFilter


@dataclass(slots=True)
class CollectionStats:
    """Groups of one rollout. resumed: drawn with tokens of an earlier one. surplus: good ones above
    what is needed. lost: unfinished when there were enough. wasted_tokens: sampled for nothing."""

    drawn: int = 0
    draws: int = 0
    resumed: int = 0
    surplus: int = 0
    lost: int = 0
    wasted_tokens: int = 0

    def metrics(
        self, dropped: Counter[str], *, kept: int, waiting: int, **more: int
    ) -> dict[str, int]:
        """To be logged under rollout/. dropped: by reason. waiting: groups for the next rollout.
        more: what only one way of collecting counts."""
        groups = dict(
            drawn=self.drawn,
            resumed=self.resumed,
            kept=kept,
            dropped=dropped.total(),
            surplus=self.surplus,
            lost=self.lost,
        )
        metrics = {
            f"groups_{name}": count for name, count in (groups | dict(waiting=waiting)).items()
        }
        metrics |= dict(draws=self.draws, wasted_tokens=self.wasted_tokens) | more
        return metrics | {
            f"dynamic_filter/drop_{reason}": count for reason, count in sorted(dropped.items())
        }

    def too_few(
        self, rollout_id: int, chosen: DynamicFilter, *, kept: int, wanted: int, draw_size: int
    ) -> str:
        """What to say when --max-num-gen-batches draws of draw_size prompts brought `kept` of the
        groups that are wanted."""
        reasons = (
            ", ".join(f"{reason} {count}" for reason, count in chosen.dropped.most_common())
            or "none"
        )
        return (
            f"rollout {rollout_id + 1}: {self.draws} draws of {draw_size} prompts (--max-num-gen-batches) brought {kept} of the {wanted} groups that "
            f"--rollout-batch-size asks for; dropped by {DYNAMIC_FILTER} {chosen.path}, by reason: {reasons}. Give easier or harder prompts, "
            "another filter, or a larger --over-sampling-batch-size"
        )
