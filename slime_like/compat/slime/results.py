"""What a user's function made of a sample, checked and read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, unwritten
from slime_like.rollout.engines.base import GenerateOutput
from slime_like.types import NOT_SAMPLED, Prompt, Sample, SampleStatus

HIGHEST_LOG_PROB = 1e-3  # rounding
_STATUS = {
    SlimeSample.Status.COMPLETED: SampleStatus.COMPLETED,
    SlimeSample.Status.TRUNCATED: SampleStatus.TRUNCATED,
    SlimeSample.Status.ABORTED: SampleStatus.ABORTED,
    SlimeSample.Status.FAILED: SampleStatus.FAILED,
}
_OPEN = {
    SlimeSample.Status.PENDING: SampleStatus.PARTIAL,
    SlimeSample.Status.ABORTED: SampleStatus.PARTIAL,
}


def from_slime(
    result: Any,
    sample: Sample,
    outputs: Sequence[GenerateOutput],
    args: SlimeArgs,
    tokenizer: Any,
    *,
    flag: str,
    may_go_on: bool = False,
) -> Sample:
    """What a function returned, checked; what it does not tell is as in `sample`. outputs: what the
    engine wrote for it. may_go_on: PENDING and ABORTED samples are not finished. Raises ValueError
    naming the flag, the sample and what is wrong with it."""
    place = f"{flag}: sample {sample.sample_id}"
    if not isinstance(result, SlimeSample):
        raise ValueError(
            f"{place}: the function returned {type(result).__name__}; return the sample that it was given (one, not several)"
        )
    statuses = _STATUS | _OPEN if may_go_on else _STATUS
    count = result.response_length
    mask = [1] * count if result.loss_mask is None else list(result.loss_mask)
    log_probs = result.rollout_log_probs
    problems = [
        (
            0 <= count < len(result.tokens),
            f"response_length is {count} of {len(result.tokens)} tokens, prompt included",
        ),
        (len(mask) == count, f"loss_mask has {len(mask)} entries for {count} response tokens"),
        (set(mask) <= {0, 1}, "loss_mask has entries that are neither 0 nor 1"),
        (
            log_probs is None or len(log_probs) == count,
            f"rollout_log_probs has {len(log_probs or ())} entries for {count} response tokens",
        ),
        (
            result.status in statuses,
            f"status is {getattr(result.status, 'value', result.status)!r}; set COMPLETED, TRUNCATED, ABORTED or FAILED",
        ),
    ]
    wrong = [words for right, words in problems if not right]
    if wrong:
        raise ValueError(f"{place}: {wrong[0]}")
    if log_probs is not None and not all(
        -math.inf < p < HIGHEST_LOG_PROB for p, m in zip(log_probs, mask) if m
    ):
        raise ValueError(
            f"{place}: rollout_log_probs are not finite, or above 0, where loss_mask is 1"
        )
    response = result.tokens[len(result.tokens) - count :]
    return replace(
        sample,
        tokens=torch.tensor(result.tokens, dtype=torch.int64),
        response_length=count,
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_log_probs=None
        if log_probs is None
        else torch.tensor(log_probs, dtype=torch.float32),
        weight_versions=versions_of(response, mask, outputs),
        status=statuses[result.status],
        reward=_reward(result, args, place),
        response=result.response or tokenizer.decode(response, skip_special_tokens=True),
        metadata=dict(result.metadata),
    )


def _reward(result: SlimeSample, args: SlimeArgs, place: str) -> float | None:
    """A number that the function set itself, or None."""
    value = result.reward
    if isinstance(value, dict):
        if args.reward_key not in value:
            raise ValueError(
                f"{place}: the reward is a dict; name the key to train on with --reward-key"
            )
        value = value[args.reward_key]
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, int | float):
        raise ValueError(f"{place}: the reward is {type(value).__name__}, must be a number")
    return float(value) if math.isfinite(value) else math.nan


def versions_of(
    response: Sequence[int], mask: Sequence[int], outputs: Sequence[GenerateOutput]
) -> tuple[int, ...]:
    """The weight version of each response token: outputs are found in the response in their order.
    Trained tokens that were not found, because the function changed them, count as of the oldest
    version."""
    oldest = min(
        (v for o in outputs for v in o.weight_versions if v != NOT_SAMPLED), default=NOT_SAMPLED
    )
    versions = [oldest if m else NOT_SAMPLED for m in mask]
    position = 0
    for output in outputs:
        size = len(output.tokens)
        for start in range(position, len(response) - size + 1):
            if size and tuple(response[start : start + size]) == tuple(output.tokens):
                versions[start : start + size] = [
                    v if m else NOT_SAMPLED
                    for v, m in zip(output.weight_versions, mask[start : start + size])
                ]
                position = start + size
                break
    return tuple(versions)


def blank(sample: SlimeSample, flag: str) -> Sample:
    """A sample of ours with the numbers and the prompt of a user's, before its first token. Raises
    ValueError where it has no numbers."""
    for name in ("group_index", "index"):
        value = getattr(sample, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{flag}: a sample has {name} {value!r}; take samples from data_source.get_samples, or number them from 0"
            )
    assert sample.group_index is not None and sample.index is not None
    return unwritten(
        Prompt(
            sample.group_index,
            sample.prompt,
            (),
            label=sample.label,
            metadata=dict(sample.metadata),
        ),
        sample.index,
    )


def whole(sample: Sample) -> GenerateOutput:
    """The response as if the engine had written it at once: its tokens and their weight versions."""
    response = tuple(sample.tokens[sample.prompt_length :].tolist())
    return GenerateOutput(sample.sample_id, response, (), "stop", sample.weight_versions)
