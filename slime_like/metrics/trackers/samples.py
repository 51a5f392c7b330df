"""A few samples of a rollout as a table for trackers."""

from __future__ import annotations

from collections.abc import Iterable

from slime_like.types import Sample

COLUMNS = (
    "rollout",
    "group",
    "sample",
    "prompt",
    "response",
    "label",
    "reward",
    "tokens",
    "status",
)
MOST_ROWS = 16
LONGEST = 2000  # characters per text
# rollouts that have a table
ALL_UNTIL = 10
THEN_EACH = 10
Rows = list[list[object]]


def has_table(step: int) -> bool:
    """Whether a rollout gets a table, which is a separate file: each of the first ones, then every
    tenth."""
    return step <= ALL_UNTIL or step % THEN_EACH == 0


def sample_rows(step: int, samples: Iterable[object]) -> Rows:
    """Rows with the columns COLUMNS, for the first samples with texts on this rank. step: the
    rollout, from 1."""
    rows: Rows = []
    for each in samples:
        if isinstance(each, Sample) and len(rows) < MOST_ROWS:
            texts = [str(text)[:LONGEST] for text in (each.text, each.response, each.label)]
            reward = None if each.reward is None else float(each.reward)
            numbers = [reward, int(each.response_length), each.status.value]
            rows.append([step, each.group_id, each.sample_id, *texts, *numbers])
    return rows
