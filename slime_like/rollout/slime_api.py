"""What slime's users import in a function of their own: `GenerateState`, `post`, `get_model_url` and `Sample`, for either engine.

``slime.rollout.sglang_rollout.GenerateState`` and ``slime.utils.http_utils.post`` become
``from slime_like.rollout.slime_api import GenerateState, Sample, post``; payload and answer are those of SGLang's ``/generate``. The engine
inside the ranks has no address, so the URL is not looked at beyond its end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slime_like.rollout.engine import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.rollout.episode import Model
from slime_like.rollout.slime_samples import SlimeArgs, SlimeSample, to_slime
from slime_like.types import NOT_SAMPLED, SampleStatus
from slime_like.types import Sample as OurSample

Sample = SlimeSample
# Keys of SGLang's sampling parameters that mean something here, and those that change nothing that is returned
_KNOWN = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids")
_IGNORED = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed")


@dataclass(slots=True)
class _Call:
    """The sample that a function is called for, and what the engine wrote for it."""

    sample_id: int
    model: Model
    engine: RolloutEngine
    seed_of: Callable[[int, int], int]
    outputs: list[GenerateOutput] = field(default_factory=list)


_current: ContextVar[_Call] = ContextVar("slime_like_custom_generate")


class GenerateState:
    """tokenizer, and the sampling parameters of training, as SGLang's."""

    def __init__(self, args: Any) -> None:
        call = _call()
        self.args = args
        self.tokenizer = call.model.tokenizer
        self.sampling_params = sampling_dict(call.model.sampling)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    return f"http://rollout-engine{endpoint}"


async def post(url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """SGLang's answer to ``/generate`` with ``input_ids`` or ``text``, and ``sampling_params``. Raises ValueError for what the engine
    does not know."""
    call = _call()
    if not url.endswith("/generate"):
        raise ValueError(f"post({url!r}): only the rollout engine's /generate is reached through slime_api.post")
    if "input_ids" in payload:
        prompt = [int(i) for i in payload["input_ids"]]
    elif isinstance(payload.get("text"), str):
        prompt = call.model.tokenizer(payload["text"], add_special_tokens=False)["input_ids"]
    else:
        raise ValueError("post: the payload needs 'input_ids' or 'text'")
    sampling = sampling_of(payload.get("sampling_params") or {}, call.model.sampling)
    seed = call.seed_of(call.sample_id, sum(len(o.tokens) for o in call.outputs))
    output = await call.engine.generate_one(GenerateRequest(call.sample_id, tuple(prompt), seed), sampling)
    call.outputs.append(output)
    return answer(output, len(prompt), call.model.tokenizer)


def answer(output: GenerateOutput, prompt_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """An output in the form of SGLang's."""
    reason: dict[str, Any] = {"type": output.finish_reason}
    if output.finish_reason == "length":
        reason["length"] = len(output.tokens)
    elif output.finish_reason == "abort":
        reason["message"] = output.failure or "aborted"
    meta = {
        "finish_reason": reason,
        "output_token_logprobs": [[p, t, None] for p, t in zip(output.log_probs, output.tokens, strict=True)],
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output.tokens),
        "weight_version": str(output.weight_versions[-1]) if output.weight_versions else "",
    }
    return {"text": tokenizer.decode(output.tokens, skip_special_tokens=False), "output_ids": list(output.tokens), "meta_info": meta}


def sampling_dict(sampling: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(sampling, name) for name in _KNOWN}
    return values | {"stop": list(sampling.stop) or None, "stop_token_ids": list(sampling.stop_token_ids) or None, "no_stop_trim": True}


def sampling_of(given: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """SGLang's sampling parameters as ours. Raises ValueError naming those that there are not."""
    unknown = [name for name in given if name not in (*_KNOWN, *_IGNORED)]
    if unknown:
        raise ValueError(f"sampling parameters {', '.join(unknown)}: unknown here; known: {', '.join(_KNOWN)}")
    values = {name: given[name] for name in _KNOWN if given.get(name) is not None}
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = (values[name],) if isinstance(values[name], str | int) else tuple(values[name])
    return replace(base, **values)


async def call_slime_function(
    function: Callable[..., Any],
    args: SlimeArgs,
    sample: OurSample,
    model: Model,
    engine: RolloutEngine,
    seed_of: Callable[[int, int], int],
    *,
    evaluation: bool,
) -> OurSample:
    """``await function(args, sample, sampling_params)``, and the sample that it returns."""
    call = _Call(sample.sample_id, model, engine, seed_of)
    _current.set(call)  # of this task alone
    more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    result = await function(args, to_slime(sample), sampling_dict(model.sampling), **more)
    return from_slime(result, sample, call.outputs, args, model.tokenizer)


_STATUS = {
    SlimeSample.Status.COMPLETED: SampleStatus.COMPLETED,
    SlimeSample.Status.TRUNCATED: SampleStatus.TRUNCATED,
    SlimeSample.Status.ABORTED: SampleStatus.ABORTED,
    SlimeSample.Status.FAILED: SampleStatus.FAILED,
}


def from_slime(result: Any, sample: OurSample, outputs: Sequence[GenerateOutput], args: SlimeArgs, tokenizer: Any) -> OurSample:
    """What a function returned, checked. Raises ValueError naming the sample and what is wrong with it."""
    place = f"--custom-generate-function-path: sample {sample.sample_id}"
    if not isinstance(result, SlimeSample):
        raise ValueError(f"{place}: the function returned {type(result).__name__}; return the sample that it was given (one, not several)")
    count = result.response_length
    mask = [1] * count if result.loss_mask is None else list(result.loss_mask)
    log_probs = result.rollout_log_probs
    problems = [
        (0 <= count < len(result.tokens), f"response_length is {count} of {len(result.tokens)} tokens, prompt included"),
        (len(mask) == count, f"loss_mask has {len(mask)} entries for {count} response tokens"),
        (set(mask) <= {0, 1}, "loss_mask has entries that are neither 0 nor 1"),
        (log_probs is None or len(log_probs) == count, f"rollout_log_probs has {len(log_probs or ())} entries for {count} response tokens"),
        (
            result.status in _STATUS,
            f"status is {getattr(result.status, 'value', result.status)!r}; set COMPLETED, TRUNCATED, ABORTED or FAILED",
        ),
    ]
    wrong = [words for right, words in problems if not right]
    if wrong:
        raise ValueError(f"{place}: {wrong[0]}")
    if log_probs is not None and not all(math.isfinite(p) for p, m in zip(log_probs, mask) if m):
        raise ValueError(f"{place}: rollout_log_probs are not finite where loss_mask is 1")
    response = result.tokens[len(result.tokens) - count :]
    return replace(
        sample,
        tokens=torch.tensor(result.tokens, dtype=torch.int64),
        response_length=count,
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_log_probs=None if log_probs is None else torch.tensor(log_probs, dtype=torch.float32),
        weight_versions=versions_of(response, mask, outputs),
        status=_STATUS[result.status],
        reward=_reward(result, args, place),
        response=result.response or tokenizer.decode(response, skip_special_tokens=True),
        metadata=dict(result.metadata),
    )


def _reward(result: SlimeSample, args: SlimeArgs, place: str) -> float | None:
    """A number that the function set itself, or None."""
    value = result.reward
    if isinstance(value, dict):
        if args.reward_key not in value:
            raise ValueError(f"{place}: the reward is a dict; name the key to train on with --reward-key")
        value = value[args.reward_key]
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, int | float):
        raise ValueError(f"{place}: the reward is {type(value).__name__}, must be a number")
    return float(value) if math.isfinite(value) else math.nan


def versions_of(response: Sequence[int], mask: Sequence[int], outputs: Sequence[GenerateOutput]) -> tuple[int, ...]:
    """The weight version of each response token: outputs are found in the response in their order. Trained tokens that were not found,
    because the function changed them, count as of the oldest version."""
    oldest = min((v for o in outputs for v in o.weight_versions), default=NOT_SAMPLED)
    versions = [oldest if m else NOT_SAMPLED for m in mask]
    position = 0
    for output in outputs:
        size = len(output.tokens)
        for start in range(position, len(response) - size + 1):
            if size and tuple(response[start : start + size]) == tuple(output.tokens):
                versions[start : start + size] = [
                    v if m else NOT_SAMPLED for v, m in zip(output.weight_versions, mask[start : start + size])
                ]
                position = start + size
                break
    return tuple(versions)


def _call() -> _Call:
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("the rollout engine is reached from a --custom-generate-function-path function only") from None
