"""Single answers for KTO: each row's answer, and its prompt with the answer of another row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_like.data.sft import sft_samples
from slime_like.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def mismatched_samples(
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_len: int | None = None,
) -> list[Sample]:
    """Two samples of each prompt, alternating: its answer, and the answer of the other prompt in
    its place, which only the reference point of KTO reads; see `sft_samples`.

    Their sample_ids are 2 group_id and 2 group_id + 1; their reward is 1 if the prompt's answer is
    desirable, else 0.
    """
    samples = []
    for prompt, other in zip(prompts, others, strict=True):
        mismatched = dataclasses.replace(prompt, label=other.label, turns=other.turns)
        for place, answer in enumerate((prompt, mismatched)):
            (sample,) = sft_samples([answer], tokenizer, max_response_len=max_response_len)
            sample_id = 2 * prompt.group_id + place
            reward = float(bool(prompt.desirable))
            samples.append(dataclasses.replace(sample, sample_id=sample_id, reward=reward))
    return samples
