"""Requests to the engine in SGLang's format, from user functions in slime's convention:
`GenerateState` and `post`.

Payload and response are those of SGLang's ``/generate``. The local engine has no address, so only
the end of the URL is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from slime_like.compat.slime.pictures import SlimeProcessor
from slime_like.compat.slime.rollout_context import rollout_context
from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, from_slime, to_slime
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import image_bytes
from slime_like.rollout.episode import CUSTOM_GENERATE, Model
from slime_like.rollout.rollouter import truncate_at_stop
from slime_like.types import Sample as OurSample
from slime_like.types import SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Keys of SGLang's sampling parameters that are supported, and those without an effect on the
# response
_KNOWN = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids")
_IGNORED = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed")


@dataclass(slots=True)
class _Call:
    """The sample for which a function was called, and the engine's outputs for it."""

    sample_id: int
    model: Model
    args: SlimeArgs
    outputs: list[GenerateOutput] = field(default_factory=list)


_STATUS = {
    "stop": SlimeSample.Status.COMPLETED,
    "length": SlimeSample.Status.TRUNCATED,
    "abort": SlimeSample.Status.ABORTED,
}
_current: ContextVar[_Call] = ContextVar("slime_like_custom_generate")


class GenerateState:
    """Counterpart of slime's GenerateState: tokenizer, processor (None in a run without pictures),
    and the sampling parameters of training as SGLang's. semaphore: never blocks, because the engine
    limits its requests itself."""

    def __init__(self, args: object) -> None:
        call = _call()
        self.args = args
        self.tokenizer = call.model.tokenizer
        images = call.model.processor
        self.processor = None if images is None else SlimeProcessor(self.tokenizer, images)
        self.sampling_params = sampling_dict(call.model.sampling)
        self.semaphore = contextlib.nullcontext()


def get_model_url(args: object, model_name: str, endpoint: str = "/generate") -> str:
    return f"http://rollout-engine{endpoint}"


async def post(
    url: str,
    payload: Mapping[str, Any],
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """SGLang's response to ``/generate`` with ``input_ids`` or ``text``, ``image_data`` (data URLs)
    and ``sampling_params``. Raises ValueError for unsupported parameters."""
    call = _call()
    if not url.endswith("/generate"):
        raise ValueError(f"post({url!r}): only the rollout engine's /generate can be called")
    if "input_ids" in payload:
        prompt = [int(i) for i in payload["input_ids"]]
    elif isinstance(payload.get("text"), str):
        prompt = call.model.tokenizer(payload["text"], add_special_tokens=False)["input_ids"]
    else:
        raise ValueError("post: the payload needs 'input_ids' or 'text'")
    images = _images(payload.get("image_data"))
    prompt = _with_image_tokens(prompt, images, call.model)
    sampling = sampling_of(payload.get("sampling_params") or {}, call.model.sampling)
    output = await _send(call, prompt, images, sampling)
    return sglang_response(output, len(prompt), call.model.tokenizer)


async def _send(
    call: _Call,
    tokens: Sequence[int],
    images: tuple[EncodedImage, ...],
    sampling: SamplingParams,
    position: int = 0,
) -> GenerateOutput:
    """The engine's output, recorded. position: tokens of the response so far; the seed follows from
    it, and from what earlier requests of this call have returned."""
    position = max(position, sum(len(output.tokens) for output in call.outputs))
    seed = call.model.seed_of(call.sample_id, position)
    request = GenerateRequest(call.sample_id, tuple(tokens), seed, images)
    output = await call.model.engine.generate_one(request, sampling)
    call.outputs.append(output)
    return output


def current_call() -> _Call | None:
    """The call of the running --custom-generate-function-path; None elsewhere."""
    return _current.get(None)


async def continue_response(
    call: _Call, sample: SlimeSample, ours: OurSample, parameters: Mapping[str, Any]
) -> SlimeSample:
    """The run's own generation within a function of --custom-generate-function-path: continue
    `sample`, which is modified and returned.

    Args:
        ours: The same sample, unfinished.
        parameters: SGLang's; max_new_tokens is for the complete response.
    """
    model = call.model
    sampling = sampling_of(parameters, model.sampling)
    room = sampling.max_new_tokens - ours.response_length
    if room <= 0:
        sample.status = sample.Status.TRUNCATED
        return sample
    images = sample.image_files
    tokens = _with_image_tokens(ours.tokens.tolist(), images, model)
    output = await _send(
        call, tokens, images, replace(sampling, max_new_tokens=room), ours.response_length
    )
    output = truncate_at_stop(model.tokenizer, ours, output, sampling.stop)
    call.outputs[-1] = output
    new = len(output.tokens)
    sample.loss_mask = [*ours.loss_mask.int().tolist(), *[1] * new]
    before = [] if ours.rollout_log_probs is None else ours.rollout_log_probs.tolist()
    sample.rollout_log_probs = [*before, *output.log_probs]
    sample.tokens = [*tokens, *output.tokens]
    sample.response_length = ours.response_length + new
    sample.weight_versions = sorted({*sample.weight_versions, *output.weight_versions}, key=str)
    sample.status = _STATUS[output.finish_reason]
    sample.response = model.text_of(
        sample.tokens[len(sample.tokens) - sample.response_length :],
        stopped=output.finish_reason == "stop",
    )
    if output.failure is not None:
        sample.metadata = {**sample.metadata, "failure": output.failure}
    return sample


def _images(data: object) -> tuple[EncodedImage, ...]:
    """The images of a payload: data URLs, one or a list. Raises ValueError."""
    urls = [data] if isinstance(data, str) else list(data or ())  # type: ignore[call-overload]
    if not all(isinstance(url, str) and url.startswith("data:") for url in urls):
        raise ValueError("post: image_data must be data URLs")
    return tuple(EncodedImage(image_bytes(url)) for url in urls)


def _with_image_tokens(
    prompt: Sequence[int], images: Sequence[EncodedImage], model: Model
) -> list[int]:
    """The prompt with all placeholders of its images. It may have one for each image, or all, as
    for SGLang."""
    processor = model.processor
    if not images:
        return list(prompt)
    if processor is None:
        raise ValueError("post: image_data needs a run with --multimodal-keys")
    if list(prompt).count(processor.rule.image_token) != len(images):
        return list(prompt)
    return processor.expand(prompt, processor.token_counts(images))


def sglang_response(
    output: GenerateOutput, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Convert an output to the format of SGLang's response."""
    reason: dict[str, object] = {"type": output.finish_reason}
    if output.finish_reason == "length":
        reason["length"] = len(output.tokens)
    elif output.finish_reason == "abort":
        reason["message"] = output.failure or "aborted"
    meta = {
        "finish_reason": reason,
        "output_token_logprobs": [
            [p, t, None] for p, t in zip(output.log_probs, output.tokens, strict=True)
        ],
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output.tokens),
        "weight_version": str(output.weight_versions[-1]) if output.weight_versions else "",
    }
    return {
        "text": tokenizer.decode(output.tokens, skip_special_tokens=False),
        "output_ids": list(output.tokens),
        "meta_info": meta,
    }


def sampling_dict(sampling: SamplingParams) -> dict[str, object]:
    values = {name: getattr(sampling, name) for name in _KNOWN}
    return values | {
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "no_stop_trim": True,
    }


def sampling_of(parameters: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Convert SGLang's sampling parameters to ours. Raises ValueError naming unsupported ones."""
    unknown = [name for name in parameters if name not in (*_KNOWN, *_IGNORED)]
    if unknown:
        raise ValueError(
            f"unsupported sampling parameters {', '.join(unknown)}; supported: {', '.join(_KNOWN)}"
        )
    values = {name: parameters[name] for name in _KNOWN if parameters.get(name) is not None}
    for name in ("stop", "stop_token_ids"):
        if name in values:
            value = values[name]
            values[name] = (value,) if isinstance(value, str | int) else tuple(value)
    return replace(base, **values)


async def call_slime_function(
    function: Callable[..., Any], args: SlimeArgs, sample: OurSample, model: Model, **options: bool
) -> OurSample:
    """Call ``await function(args, sample, sampling_params)`` and convert its sample; for a list,
    the first one, with the others as its branches. Raises ValueError for an invalid sample."""
    call = _Call(sample.sample_id, model, args)
    token = _current.set(call)  # for this task only
    try:
        result = await function(args, to_slime(sample), sampling_dict(model.sampling), **options)
    finally:
        _current.reset(token)
    results = result if isinstance(result, list) else [result]
    read = [
        from_slime(each, sample, call.outputs, args, model.tokenizer, flag=CUSTOM_GENERATE)
        for each in results
    ]
    return merge_episode(read, f"{CUSTOM_GENERATE}: sample {sample.sample_id}")


def merge_episode(samples: Sequence[OurSample], place: str) -> OurSample:
    """Merge the sequences of one episode into a sample with branches. Raises ValueError for an
    empty list, and for rewards that differ."""
    if not samples:
        raise ValueError(
            f"{place}: the function returned an empty list; return at least one sample"
        )
    rewards = {s.reward for s in samples if s.reward is not None}
    if len(rewards) > 1:
        raise ValueError(
            f"{place}: the function returned {len(samples)} samples with rewards "
            f"{sorted(rewards)}; the sequences of an episode must have the same"
        )
    reward = rewards.pop() if rewards else None
    return replace(samples[0], reward=reward, branches=tuple(map(_branch, samples[1:])))


def _branch(sample: OurSample) -> OurSample:
    """Mask an aborted branch, so that it is not trained on; the episode remains valid."""
    if sample.status != SampleStatus.ABORTED:
        return sample
    return replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def _call() -> _Call:
    """The call of the running function's sample; within a rollout function, a call without a
    sample."""
    try:
        return _current.get()
    except LookupError:
        context = rollout_context()
        responder = context.responder
        return _Call(context.next_number(), responder.model(responder.sampling), context.args)
