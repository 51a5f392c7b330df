"""Samples of supervised fine-tuning (`--loss-type sft_loss`): the label is the response, or the
assistant turns of a conversation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from slime_like.images.processor import ImageProcessor
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


def _conversation(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    processor: ImageProcessor | None,
) -> Sample:
    """A conversation as a sample, with a loss mask over its trained turns (`Prompt.turns`). Turns,
    and the text between them, are tokenized separately, as they are at inference. limit: maximum
    number of tokens after the first prompt."""
    texts = [text for text, _ in prompt.turns]
    if processor is not None:
        texts = [processor.written(text) for text in texts]
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
    if processor is not None and prompt.images:
        ids, loss_mask = _with_image_tokens(prompt, parts, limit, processor)
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
        images=prompt.images,
    )


def _with_image_tokens(
    prompt: Prompt, parts: Sequence[Sequence[int]], limit: int | None, processor: ImageProcessor
) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of a conversation's turns, with as many placeholders as their images have
    features. parts: ids of the turns. Raises ValueError if `limit` cuts off an image."""
    counts = processor.token_counts(prompt.images)
    placeholder = processor.rule.image_token
    used = 0
    first = prompt.tokens.count(placeholder)
    while first:
        first -= counts[used]
        used += 1
    ids: list[int] = []
    loss_mask: list[bool] = []
    for part, (_, trained) in zip(parts, prompt.turns):
        expanded = list(part)
        if not trained:  # an answer writes placeholders as plain tokens, if at all
            expanded = processor.expand(part, counts[used:])
            used += list(part).count(placeholder)
        ids += expanded
        loss_mask += [trained] * len(expanded)
    cut = [] if limit is None else list(zip(ids[limit:], loss_mask[limit:]))
    if (placeholder, False) in cut:
        raise ValueError(
            f"prompt {prompt.group_id}: --rollout-max-response-len {limit} cuts off an image of "
            f"the conversation {prompt.text[:80]!r}..., which has {len(ids)} tokens after its "
            "first prompt; raise the limit, or shorten the row"
        )
    return ids, loss_mask


def sft_samples(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_len: int | None = None,
    processor: ImageProcessor | None = None,
) -> list[Sample]:
    """Samples of prompt and label, or of a conversation; the loss mask covers the answer and the
    end-of-sequence token, or the trained turns.

    The answer is tokenized separately, as if generated after the prompt. A response longer than
    `max_response_len` is truncated, without an end token, and the sample is `TRUNCATED`. sample_id
    is the prompt's group_id. processor: of the images, where prompts have any. Raises ValueError if
    a label is not a non-empty string, the turns of a conversation cannot be tokenized separately,
    or the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("--loss-type sft_loss: the tokenizer has no end-of-sequence token")
    if prompts and prompts[0].turns:
        return [_conversation(prompt, tokenizer, max_response_len, processor) for prompt in prompts]
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
        images=prompt.images,
    )
