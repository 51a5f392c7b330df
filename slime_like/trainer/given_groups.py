"""Sample groups without sampling: recorded rollouts and supervised data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.data.pairs import pair_samples
from slime_like.data.sft import sft_samples
from slime_like.distributed.collectives import together
from slime_like.rollout.recording import check_values, load_rollout
from slime_like.rollout.sample_plane import share_index
from slime_like.sample_index import TRUNCATED_FRACTION
from slime_like.types import Prompt, SampleGroup, truncated_fraction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def supervised_groups(
    run: RunConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SampleGroup], dict[str, float]]:
    """Supervised samples, one or a preference pair per prompt, of which each rank builds its share;
    and the fraction that was truncated."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count, make = run.algorithm.samples_together, sft_samples
    if count > 1:
        make = partial(pair_samples, scored=run.algorithm.trains_reward_model)
    limit = run.rollout.rollout_max_response_len
    own = together(lambda: make(prompts[rank::world], tokenizer, max_response_len=limit))
    made = share_index(own, [place // count % world for place in range(count * len(prompts))])
    rows = zip(*[iter(made)] * count, strict=True)
    groups = [SampleGroup(row[0].group_id, tuple(row)) for row in rows]
    return groups, {TRUNCATED_FRACTION: truncated_fraction(made)}


def recorded_groups(run: RunConfig, step: int) -> list[SampleGroup]:
    """The groups of --load-debug-rollout-data. Raises ValueError if another run recorded them."""
    template = run.debug.load_debug_rollout_data
    assert template is not None
    rollout = run.rollout
    groups = load_rollout(template, step)
    found, wanted = (
        sum(len(g.samples) for g in groups),
        rollout.rollout_batch_size * rollout.n_samples_per_prompt,
    )
    if found != wanted:
        raise ValueError(
            f"--load-debug-rollout-data {template}: rollout {step + 1} has {found} samples, and --rollout-batch-size times "
            f"--n-samples-per-prompt is {wanted}; give the sizes of the recorded run"
        )
    try:
        check_values(groups, run.gpt.vocab_size or 2**31)
    except ValueError as error:
        raise ValueError(
            f"--load-debug-rollout-data {template}: rollout {step + 1}: {error}"
        ) from None
    return groups
