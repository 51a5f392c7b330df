"""Samples of supervised fine-tuning (`--loss-type sft_loss`): the label is the response, or the
assistant turns of a conversation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from slime_like.types import Prompt, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answer_problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why a row cannot be trained on, or None; the check of `data.prompts` for supervised runs."""
    if isinstance(label, str) and label:
        return None
    actual = "null or missing" if label is None else type(label).__name__
    if label == "":
        actual = "an empty string"
    return f"--loss-type sft_loss: the answer (--label-key) must be non-empty text, not {actual}"


def _conversation(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> Sample:
    """A conversation as a sample, with a loss mask over its trained turns (`Prompt.turns`). Turns,
    and the text between them, are tokenized separately, as they are at inference. limit: maximum
    number of tokens after the first prompt."""
    texts = [text for text, _ in prompt.turns]
    parts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    loss_mask: list[bool] = []
    for part, (_, trained) in zip(parts, prompt.turns):
        ids += part
        loss_mask += [trained] * len(part)
    joined_ids = tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    if list(joined_ids) != ids and tokenizer.decode(joined_ids) != tokenizer.decode(ids):
        raise ValueError(
            f"prompt {prompt.group_id}: the turns of {prompt.text[:80]!r}... tokenized one by one "
            "do not add up to the conversation, so no loss mask is exact; use another tokenizer"
        )
    return Sample(
        group_id=prompt.group_id,
        sample_id=prompt.group_id,
        tokens=torch.tensor([*prompt.tokens, *ids[:limit]], dtype=torch.int64),
        response_length=len(ids[:limit]),
        loss_mask=torch.tensor(loss_mask[:limit], dtype=torch.bool),
        status=SampleStatus.COMPLETED if ids == ids[:limit] else SampleStatus.TRUNCATED,
        text=prompt.text,
        response="".join(texts),
        metadata=prompt.metadata,
    )


def sft_samples(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_len: int | None = None,
) -> list[Sample]:
    """Samples of prompt and label, or of a conversation; the loss mask covers the answer and the
    end-of-sequence token, or the trained turns.

    The answer is tokenized separately, as if generated after the prompt. A response longer than
    `max_response_len` is truncated, without an end token, and the sample is `TRUNCATED`. sample_id
    is the prompt's group_id. Raises ValueError if a label is not a non-empty string, the turns of a
    conversation cannot be tokenized separately, or the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("--loss-type sft_loss: the tokenizer has no end-of-sequence token")
    if prompts and prompts[0].turns:
        return [_conversation(prompt, tokenizer, max_response_len) for prompt in prompts]
    for prompt in prompts:
        if problem := answer_problem(prompt.label, prompt.metadata):
            raise ValueError(f"prompt {prompt.group_id}: {problem}: {prompt.text[:80]!r}")
    if not prompts:
        return []
    answers = tokenizer([prompt.label for prompt in prompts], add_special_tokens=False)["input_ids"]
    return [
        _sample(prompt, list(ids), tokenizer.eos_token_id, max_response_len)
        for prompt, ids in zip(prompts, answers)
    ]


def _sample(prompt: Prompt, answer: list[int], eos: int, limit: int | None) -> Sample:
    if not answer or answer[-1] != eos:
        answer.append(eos)
    truncated = limit is not None and len(answer) > limit
    answer = answer[:limit]
    return Sample(
        group_id=prompt.group_id,
        sample_id=prompt.group_id,
        tokens=torch.tensor([*prompt.tokens, *answer], dtype=torch.int64),
        response_length=len(answer),
        loss_mask=torch.ones(len(answer), dtype=torch.bool),
        status=SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED,
        text=prompt.text,
        response=prompt.label,
        label=prompt.label,
        metadata=prompt.metadata,
    )
