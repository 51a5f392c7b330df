"""Recordings of --save-debug-rollout-data: the samples of a rollout, and the training inputs of
each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from slime_like.batching.builder import Batches
from slime_like.checkpoints.files import writes_to
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.rollout.recording import (
    remove_token_values,
    save_rollout,
    save_token_texts,
    save_token_values,
)
from slime_like.rollout.shared_groups import gather_groups
from slime_like.samples.exchange import gather_on_rank_zero
from slime_like.samples.groups import SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FLAG = "--save-debug-rollout-data"
TOKEN_VALUES = ("advantages", "old_log_probs", "ref_log_probs", "values", "importance_weights")


def record_rollout(
    target: str,
    step: int,
    groups: Sequence[SampleGroup],
    rank: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write the samples of all ranks on rank 0. Collective. tokenizer: None if the run has none."""
    if rank == 0:  # before the collective below, so before any rank writes its part
        with writes_to(FLAG, target):
            remove_token_values(target, step)
    gathered = gather_groups(groups, gather_on_rank_zero)
    if rank == 0:
        with writes_to(FLAG, target):
            save_rollout(target, step, gathered)
            if tokenizer is not None:
                save_token_texts(target, step, gathered, tokenizer)


def record_training(target: str, step: int, batches: Batches, layout: ParallelLayout) -> None:
    """Write advantages, log-probs and entropy of this data-parallel rank's samples; with
    --use-rollout-logprobs no log-probs and entropy of the policy, which are the engine's there.
    Nothing is written if a user hook changed the number of samples, because their names are
    lost."""
    samples = list(chain.from_iterable(batch.samples for batch in batches.policy))
    if layout.tp_rank or layout.cp_rank or layout.pp_rank:
        return
    if len(samples) != len(batches.sample_keys):
        return
    names = [name for name in TOKEN_VALUES if batches.entropies or name != "old_log_probs"]
    values: dict[str, dict[str, Tensor]] = {}
    for i, (key, sample) in enumerate(zip(batches.sample_keys, samples)):
        columns = {name: getattr(sample, name) for name in names}
        columns["entropy"] = batches.entropies[i] if batches.entropies else None
        values[key] = {name: value for name, value in columns.items() if value is not None}
    with writes_to(FLAG, target):
        save_token_values(target, step, layout.dp_rank, values)
