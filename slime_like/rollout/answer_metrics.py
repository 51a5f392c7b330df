"""What the answers of a rollout are made of, as metrics.

A policy may fill its answers with tokens of the chat template (`<|im_start|>`) where the reward
does not object, or learn answers on which a grader hangs. No limit on length or entropy shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.metrics.health import SPECIAL_TOKENS
from slime_like.rewards.grader import UNFIT
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.types import Sample, SampleStatus

SCORED_AS_EMPTY = "rollout/scored_as_empty_frac"


def answer_metrics(
    groups: Sequence[SampleGroup],
    special_ids: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Fraction of the generated tokens that are special and do not end a turn, and of the samples
    that their reward scored like an empty answer. Collective.

    Args:
        groups: Each sample is complete on the rank that generated it.
        special_ids: See `special_token_ids`.
        group: Process group of all ranks, if the default group is in use at the same time.
    """
    ids = torch.tensor(special_ids, dtype=torch.int64)
    samples = flatten(groups)
    local = [s for s in samples if isinstance(s, Sample)]
    sequences = chain.from_iterable((s, *s.branches) for s in local)
    counts = [count_special(each, ids) for each in sequences]
    totals = [sum(column) for column in zip((0, 0), *counts)]
    by_rank = gather((*totals, sum(UNFIT in s.metadata for s in local)), group)
    special, generated, unfit = (sum(column) for column in zip(*by_rank))
    metrics = {SCORED_AS_EMPTY: unfit / len(samples)} if samples else {}
    return metrics | ({SPECIAL_TOKENS: special / generated} if generated else {})


def count_special(sample: Sample, ids: Tensor) -> tuple[int, int]:
    """Special tokens inside the turns of one sequence, and its generated tokens.

    Args:
        sample: One sequence; its branches are not counted.
        ids: [K] int64, the special tokens.
    """
    generated = sample.loss_mask
    response = sample.tokens[sample.prompt_length :]
    ends_turn = torch.zeros_like(generated)
    ends_turn[:-1] = generated[:-1] & ~generated[1:]
    ends_turn[-1:] = sample.status == SampleStatus.COMPLETED
    special = torch.isin(response, ids) & generated & ~ends_turn
    return int(special.sum()), int(generated.sum())
