"""Sample groups without sampling: recorded rollouts and supervised data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from arguments.schema import AlgorithmConfig
from slime_like.data.mismatched import mismatched_samples
from slime_like.data.pairs import pair_samples
from slime_like.data.sft import sft_samples
from slime_like.distributed.collectives import together
from slime_like.images.processor import ImageProcessor
from slime_like.metrics.names import TRUNCATED_FRACTION
from slime_like.rollout.recording import check_values, load_rollout
from slime_like.samples.episodes import truncated_fraction
from slime_like.samples.exchange import share_index
from slime_like.samples.groups import SampleGroup, split
from slime_like.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def supervised_groups(
    algorithm: AlgorithmConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_len: int,
    processor: ImageProcessor | None = None,
) -> tuple[list[SampleGroup], dict[str, float]]:
    """Supervised samples of each prompt, of which each rank builds its share: one, a preference
    pair, or an answer and a mismatched one; and the fraction that was truncated."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    size = algorithm.samples_together
    make: Callable[..., list[Sample]] = partial(sft_samples, processor=processor)
    if algorithm.pair_loss is not None:
        scored = algorithm.trains_reward_model
        make = partial(pair_samples, scored=scored, processor=processor)
    columns = [prompts]
    if algorithm.scores_mismatches:
        make = mismatched_samples
        columns = [prompts, [*prompts[1:], *prompts[:1]]]
    shares = [column[rank::world] for column in columns]
    own = together(lambda: make(*shares, tokenizer, max_response_len=max_response_len))
    holders = [i // size % world for i in range(size * len(prompts))]
    samples = share_index(own, holders)
    parts = split(samples, [size] * len(prompts))
    groups = [SampleGroup(part[0].group_id, part) for part in parts]
    return groups, {TRUNCATED_FRACTION: truncated_fraction(samples)}


def recorded_groups(
    template: str, step: int, *, expected: int, vocab_size: int | None
) -> list[SampleGroup]:
    """The groups of --load-debug-rollout-data. Raises ValueError if another run recorded them.

    Args:
        template: The flag's value.
        step: Of the rollout, from 0.
        expected: Number of samples of a rollout.
        vocab_size: Of the policy; None if it is not known.
    """
    groups = load_rollout(template, step)
    count = sum(len(group.samples) for group in groups)
    if count != expected:
        raise ValueError(
            f"--load-debug-rollout-data {template}: rollout {step + 1} has {count} samples, and "
            f"--rollout-batch-size times --n-samples-per-prompt is {expected}; give the sizes of "
            "the recorded run"
        )
    try:
        check_values(groups, vocab_size or 2**31)
    except ValueError as error:
        raise ValueError(
            f"--load-debug-rollout-data {template}: rollout {step + 1}: {error}"
        ) from None
    return groups
