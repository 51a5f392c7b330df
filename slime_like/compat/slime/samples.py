"""slime's sample and argument types, which user functions are called with.

`SlimeSample` has the attributes of slime's ``Sample`` that apply here, under the same names. A
function may modify it; the caller validates the result and converts it back.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from arguments.function_args import function_args
from slime_like.data.tokenizer import response_text
from slime_like.engines.base import GenerateOutput
from slime_like.function_args import FunctionArgs, is_plain
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import ImageProblem
from slime_like.rewards.limit import to_reward
from slime_like.samples.slime_sample import SlimeSample
from slime_like.types import (
    NOT_SAMPLED,
    PROMPT_MESSAGES,
    REWARD_DETAILS,
    SAMPLE_ATTRIBUTES,
    Prompt,
    Sample,
    SampleStatus,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
SlimeArgs = FunctionArgs
slime_args = function_args


@contextlib.contextmanager
def raising(place: str) -> Iterator[None]:
    """Turn an error of a user function into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        message = f"{place}: the function raised {type(error).__name__}: {error}"
        raise ValueError(message) from error


_TO_SLIME = {
    SampleStatus.COMPLETED: SlimeSample.Status.COMPLETED,
    SampleStatus.TRUNCATED: SlimeSample.Status.TRUNCATED,
    SampleStatus.ABORTED: SlimeSample.Status.ABORTED,
    SampleStatus.FAILED: SlimeSample.Status.FAILED,
}
HIGHEST_LOG_PROB = 1e-3  # tolerance for rounding
_FROM_SLIME = {slime: ours for ours, slime in _TO_SLIME.items()}
_UNFINISHED = (SlimeSample.Status.PENDING, SlimeSample.Status.ABORTED)


def to_slime(sample: Sample) -> SlimeSample:
    """Convert to slime's Sample. An unfinished sample is PENDING before its first token and ABORTED
    after it, as in slime."""
    converted = SlimeSample(
        group_index=sample.group_id,
        index=sample.sample_id,
        prompt=sample.metadata.get(PROMPT_MESSAGES, sample.text),
        response=sample.response,
        response_length=sample.response_length,
        label=sample.label,
        reward=sample.reward,
        weight_versions=sorted(set(sample.weight_versions)),
        status=_TO_SLIME.get(sample.status, SlimeSample.Status.PENDING),
        metadata=user_metadata(sample),
        rollout_id=sample.sample_id,
        images=sample.images,
    )
    vars(converted).update(sample.metadata.get(SAMPLE_ATTRIBUTES, {}))
    if sample.response_length:
        converted.status = _TO_SLIME.get(sample.status, SlimeSample.Status.ABORTED)
        converted.tokens = sample.tokens.tolist()
        converted.loss_mask = sample.loss_mask.int().tolist()
        if sample.rollout_log_probs is not None:
            converted.rollout_log_probs = sample.rollout_log_probs.tolist()
    return converted


def user_metadata(sample: Sample) -> dict[str, Any]:
    """The metadata without what the sample has under attributes."""
    hidden = (PROMPT_MESSAGES, SAMPLE_ATTRIBUTES)
    return {key: value for key, value in sample.metadata.items() if key not in hidden}


def _internal(result: SlimeSample, sample: Sample) -> dict[str, object]:
    """The metadata that `user_metadata` leaves out."""
    kept: dict[str, object] = {}
    if PROMPT_MESSAGES in sample.metadata:
        kept[PROMPT_MESSAGES] = sample.metadata[PROMPT_MESSAGES]
    if added := _plain_attributes(result):
        kept[SAMPLE_ATTRIBUTES] = added
    return kept


def _plain_attributes(sample: SlimeSample) -> dict[str, Any]:
    """The attributes that functions have added, for others. Those that hold other than plain values
    are left out, with a warning for each name."""
    added = {name: value for name, value in sample.added.items() if is_plain(value)}
    for name in sample.added.keys() - added.keys() - _not_passed_on:
        _not_passed_on.add(name)
        kind = type(sample.added[name]).__name__
        logger.warning(
            f"sample.{name} is a {kind}, and is not passed on to other functions: only text, "
            "numbers, lists and dicts are"
        )
    return added


_not_passed_on: set[str] = set()  # names that were warned about


def to_slime_groups(groups: Iterable[Iterable[Sample]]) -> list[list[SlimeSample]]:
    return [[to_slime(sample) for sample in group] for group in groups]


def refuse_token_rewards(sample: Sample) -> None:
    """Raise ValueError for a sample with token rewards."""
    if sample.token_rewards is not None:
        raise ValueError(
            f"sample {sample.sample_id} has a reward per token, but samples of rollout functions "
            "have a single one; add --sum-token-rewards"
        )


def to_slime_with_output(sample: Sample) -> SlimeSample:
    """`to_slime`, with the response recorded as an engine output. Raises ValueError for a sample
    with token rewards."""
    refuse_token_rewards(sample)
    converted = to_slime(sample)
    if sample.response_length:
        converted.engine_outputs = [as_output(sample)]
    return converted


def from_slime(
    result: object,
    sample: Sample,
    outputs: Sequence[GenerateOutput],
    args: SlimeArgs,
    tokenizer: PreTrainedTokenizerBase,
    *,
    flag: str,
    allow_unfinished: bool = False,
) -> Sample:
    """Validate and convert a function's result for a sample.

    Args:
        result: What the function returned.
        sample: Source of the fields that the result does not set.
        outputs: The engine's outputs for it.
        args: The settings; --reward-key is used.
        tokenizer: The policy's.
        flag: The function's, for messages.
        allow_unfinished: PENDING and ABORTED samples continue.

    Raises:
        ValueError: Names the flag, the sample and the problem.
    """
    place = f"{flag}: sample {sample.sample_id}"
    statuses = dict(_FROM_SLIME)
    if allow_unfinished:
        statuses |= dict.fromkeys(_UNFINISHED, SampleStatus.PARTIAL)
    if not isinstance(result, SlimeSample):
        raise ValueError(
            f"{place}: the function returned {type(result).__name__}; return the sample that it "
            "received, or a list of samples for several sequences"
        )
    mask = _checked_mask(result, place, statuses)
    count = result.response_length
    log_probs = None
    if result.rollout_log_probs is not None:
        log_probs = torch.tensor(result.rollout_log_probs, dtype=torch.float32)
    response = result.tokens[len(result.tokens) - count :]
    text = result.response or response_text(
        tokenizer,
        response,
        stopped=result.status == SlimeSample.Status.COMPLETED,
        skip_special_tokens=args.rollout_skip_special_tokens,
    )
    return replace(
        sample,
        tokens=torch.tensor(result.tokens, dtype=torch.int64),
        response_length=count,
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_log_probs=log_probs,
        weight_versions=versions_of(response, mask, outputs),
        status=statuses[result.status],
        reward=_reward(result, args, place),
        response=text,
        metadata=dict(result.metadata) | _internal(result, sample) | _details(result, args),
        images=_images(result, place),
    )


def _images(result: SlimeSample, place: str) -> tuple[EncodedImage, ...]:
    try:
        return result.image_files
    except ImageProblem as problem:
        raise ValueError(f"{place}: multimodal_inputs: {problem}") from problem


def _checked_mask(
    result: SlimeSample, place: str, statuses: Collection[SlimeSample.Status]
) -> list[int]:
    """The loss mask of a sample, after checking the consistency of its fields. Raises
    ValueError."""
    count = result.response_length
    log_probs = result.rollout_log_probs
    mask = [1] * count if result.loss_mask is None else list(result.loss_mask)
    status = getattr(result.status, "value", result.status)
    problems = {
        f"response_length is {count} of {len(result.tokens)} tokens, prompt included": (
            not 0 <= count < len(result.tokens)
        ),
        f"loss_mask has {len(mask)} entries for {count} response tokens": len(mask) != count,
        "loss_mask has entries that are neither 0 nor 1": not set(mask) <= {0, 1},
        f"rollout_log_probs has {len(log_probs or ())} entries for {count} response tokens": (
            log_probs is not None and len(log_probs) != count
        ),
        f"status is {status!r}; set COMPLETED, TRUNCATED, ABORTED or FAILED": (
            result.status not in statuses
        ),
        "rollout_log_probs are not finite, or above 0, where loss_mask is 1": not all(
            -math.inf < p < HIGHEST_LOG_PROB for p, m in zip(log_probs or (), mask) if m
        ),
    }
    for problem, holds in problems.items():
        if holds:
            raise ValueError(f"{place}: {problem}")
    return mask


def _reward(result: SlimeSample, args: SlimeArgs, place: str) -> float | None:
    """The reward that the function set, or None."""
    value = result.reward
    if isinstance(value, dict):
        if args.reward_key not in value:
            raise ValueError(
                f"{place}: the reward is a dict; set --reward-key to the key to train on"
            )
        value = value[args.reward_key]
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, int | float):
        raise ValueError(f"{place}: the reward is {type(value).__name__}, must be a number")
    return to_reward(value, place)


def _details(result: SlimeSample, args: SlimeArgs) -> dict[str, object]:
    """The other numbers of a dict reward, stored like those of a reward function."""
    value = result.reward if isinstance(result.reward, dict) else {}
    details = {
        str(name): float(item)
        for name, item in value.items()
        if name != args.reward_key and isinstance(item, int | float)
    }
    return {REWARD_DETAILS: details} if details else {}


def versions_of(
    response: Sequence[int], mask: Sequence[int], outputs: Sequence[GenerateOutput]
) -> tuple[int, ...]:
    """The weight version of each response token, found by locating the outputs in the response in
    order. Trained tokens that were not found, because the function changed them, get the oldest
    version."""
    sampled = set(chain.from_iterable(output.weight_versions for output in outputs))
    oldest = min(sampled - {NOT_SAMPLED}, default=NOT_SAMPLED)
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


def prompt_tokens(sample: SlimeSample, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a prompt; messages are rendered with the chat template."""
    text = sample.prompt
    if not isinstance(text, str):
        text = str(tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def empty_sample(sample: SlimeSample, flag: str) -> Sample:
    """Our sample with the ids and the prompt of a user's sample, before its first token. Raises
    ValueError for a sample without ids."""
    for name in ("group_index", "index"):
        value = getattr(sample, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{flag}: a sample has {name} {value!r}; take samples from "
                "data_source.get_samples, or number them from 0"
            )
    assert sample.group_index is not None and sample.index is not None
    metadata = dict(sample.metadata)
    text = sample.prompt if isinstance(sample.prompt, str) else ""
    if text != sample.prompt:
        metadata[PROMPT_MESSAGES] = sample.prompt
    if added := _plain_attributes(sample):
        metadata[SAMPLE_ATTRIBUTES] = added
    prompt = Prompt(sample.group_index, text, (), label=sample.label, metadata=metadata)
    return Sample.empty(prompt, sample.index)


def as_output(sample: Sample) -> GenerateOutput:
    """The response as one engine output: its tokens and their weight versions."""
    response = tuple(sample.tokens[sample.prompt_length :].tolist())
    return GenerateOutput(sample.sample_id, response, (), "stop", sample.weight_versions)
