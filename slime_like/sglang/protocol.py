"""Wire format of SGLang's /generate: request bodies, and validation of responses token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from slime_like.checked_json import (
    InvalidResponse,
    Items,
    LogProb,
    StrictModel,
    TokenId,
    read,
)
from slime_like.engines.base import FinishReason, GenerateOutput, GenerateRequest, SamplingParams
from slime_like.images.processor import ImageProcessor
from slime_like.servers.indexer_topk import read_indexer_topk
from slime_like.servers.routed_experts import read_routed_experts
from slime_like.servers.server_api import Legal, RefusedByServer
from slime_like.servers.token_checks import (
    VersionSpan,
    check_log_prob_tokens,
    check_tokens,
    of_request,
    weight_versions,
)
from slime_like.text import clean, shown

_NOTHING_NEW = {"temperature": 1.0, "max_new_tokens": 0}
_ANSWER_BYTES = 2**20  # size limit of a response without its tokens
_MASK_BYTES = 16  # size limit per token of a sampling mask
_TOKEN_BYTES = 512  # size limit per token: id, log-prob, text and weight version


class _FinishReason(StrictModel):
    type: FinishReason
    status_code: Annotated[int, Field(ge=100, le=599)] | None = None
    message: object = None


class _Meta(StrictModel):
    id: str | None = None


class _Answer(StrictModel):
    meta_info: _Meta


class _GenerationMeta(_Meta):
    finish_reason: _FinishReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: object = None  # of all tokens, without weight_versions
    weight_versions: Items[VersionSpan] | None = None
    output_token_logprobs: Items[tuple[LogProb, TokenId, object]] = Field(default_factory=list)
    routed_experts: str | None = None
    indexer_topk: str | None = None
    # of each token, the tokens that it was sampled from, and its log-prob among them
    output_token_sampling_mask: Items[Items[TokenId]] | None = None
    output_token_sampling_logprobs: Items[LogProb] | None = None


class _Generation(_Answer):
    output_ids: Items[TokenId] = Field(default_factory=list)
    meta_info: _GenerationMeta
    prompt_token_ids: Items[int] | None = None  # of a prompt with images


class _ScoresMeta(_Meta):
    input_token_logprobs: Items[tuple[LogProb | None, TokenId, object]]


class _Scores(_Answer):
    meta_info: _ScoresMeta


A = TypeVar("A", bound=_Answer)


def generation_body(
    request: GenerateRequest,
    sampling: SamplingParams,
    rid: str,
    images: ImageProcessor | None = None,
) -> dict[str, object]:
    """The body of one request. Seeds only take effect with --sglang-enable-deterministic-inference.
    images: the model's processor, for prompts with images. Raises ValueError for stop tokens with
    ignore_end_tokens, which SGLang does not support."""
    if sampling.ignore_end_tokens and sampling.stop_token_ids:
        raise ValueError(
            f"SGLang's ignore_eos also ignores the stop tokens {list(sampling.stop_token_ids)}; "
            "use either ignore_end_tokens or stop_token_ids"
        )
    extra: dict[str, object] = {}
    if sampling.report_routed_experts:
        extra["return_routed_experts"] = True
    if sampling.report_indexer_topk:
        extra["return_indexer_topk"] = True
    if masked(sampling):
        extra["return_sampling_mask"] = True
        extra["sampling_logprobs_mode"] = "selected"
    prompt = list(request.prompt_tokens)
    if request.images:
        assert images is not None, "a run with images has their processor"
        # the server repeats each placeholder, and reports the prompt that it has made
        prompt = images.collapse(request.prompt_tokens, request.images)
        extra["image_data"] = [images.served(image).data_url for image in request.images]
        extra["return_prompt_token_ids"] = True
    return extra | {
        "rid": rid,
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_end_tokens,
            "sampling_seed": request.seed & (2**63 - 1),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
    }


def masked(sampling: SamplingParams) -> bool:
    """Whether servers report sampling masks; greedy sampling has none."""
    return sampling.report_sampling_mask and not sampling.greedy


def scoring_body(tokens: Sequence[int], rid: str, start: int = 0) -> dict[str, object]:
    """A request for the log-probs of `tokens` after index `start`, at temperature 1 (the only one
    that SGLang supports for input tokens)."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": start,
        "sampling_params": dict(_NOTHING_NEW),
    }


def scoring_body_of_text(text: str, rid: str) -> dict[str, object]:
    """As `scoring_body`, for a text that the server tokenizes."""
    return {
        "rid": rid,
        "text": text,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": dict(_NOTHING_NEW),
    }


def max_response_bytes(
    request: GenerateRequest, sampling: SamplingParams, token_bytes: int = 0
) -> int:
    """Size limit of the response in bytes. token_bytes: bytes of choices per token."""
    tokens = len(request.prompt_tokens) + sampling.max_new_tokens
    if masked(sampling):
        token_bytes += _MASK_BYTES * max(1, sampling.top_k)
    return _ANSWER_BYTES + tokens * (_TOKEN_BYTES + token_bytes)


def read_generation(
    answer: bytes, request: GenerateRequest, sampling: SamplingParams, rid: str, legal: Legal
) -> GenerateOutput:
    """Validate a response and convert it to a `GenerateOutput`.

    Raises:
        InvalidResponse: Tokens, log-probs, counts and finish reason are inconsistent.
        WrongWeightVersion: A weight version is not `legal`.
        RefusedByServer: The server aborted the request.
    """
    with of_request(rid):
        generation = _read(_Generation, answer, rid)
        meta = generation.meta_info
        tokens = tuple(generation.output_ids)
        finish = meta.finish_reason
        if finish.type == "abort" and finish.status_code is not None:
            message = f"request {rid}: {clean(str(finish.message))}"
            raise RefusedByServer(message, finish.status_code)
        aborted = finish.type == "abort"
        check_tokens(tokens, sampling, legal.vocab_size, aborted=aborted, key="output_ids")
        if meta.completion_tokens not in (None, len(tokens)):
            raise InvalidResponse(
                f"{len(tokens)} tokens, and the server counted {meta.completion_tokens}"
            )
        length = len(request.prompt_tokens)
        if meta.prompt_tokens not in (None, length):
            raise InvalidResponse(
                f"a prompt of {length} tokens, and the server read {meta.prompt_tokens}"
            )
        if request.images and generation.prompt_token_ids is not None:
            _check_prompt(generation.prompt_token_ids, request)
        log_probs = _log_probs(meta, tokens)
        versions = _weight_versions(meta, len(tokens), legal.versions)
        masks = None
        if masked(sampling):
            masks, log_probs = _sampling_masks(meta, tokens, sampling, legal.vocab_size)
        output = GenerateOutput(
            request.sample_id, tokens, log_probs, finish.type, versions, sampling_mask=masks
        )
        experts, keys = None, None
        if sampling.report_routed_experts:
            assert legal.routed_experts is not None, "checked by the caller"
            experts = read_routed_experts(
                meta.routed_experts, request, output, legal.routed_experts
            )
        if sampling.report_indexer_topk:
            assert legal.indexer_topk is not None, "checked by the caller"
            keys = read_indexer_topk(meta.indexer_topk, request, output, legal.indexer_topk)
        return replace(output, routed_experts=experts, indexer_topk=keys)


def _check_prompt(reported: Sequence[int], request: GenerateRequest) -> None:
    """Check that the server has read the prompt's own tokens: another tokenisation of its text may
    have as many, and so may an image of another size."""
    for place, (token, other) in enumerate(zip(request.prompt_tokens, reported)):
        if token != other:
            raise InvalidResponse(
                f"token {place} of the prompt is {token}, and the server read {shown(other, 40)}"
            )


def vocabulary_body(token: int, rid: str) -> dict[str, object]:
    """A request that a server rejects with status 400 if `token` is not in its vocabulary.
    `scoring_body` would instead return the log-prob of another token."""
    return {**scoring_body([0], rid), "token_ids_logprob": [token]}


def read_scores(
    answer: bytes, tokens: Sequence[int], rid: str, start: int = 0, last: int | None = None
) -> tuple[float, ...]:
    """Log-probs of tokens[start + 1:]. last: the last token of the vocabulary, which SGLang may
    report as 0 here. Raises InvalidResponse."""
    scores: list[float] = []
    with of_request(rid):
        entries = _read(_Scores, answer, rid).meta_info.input_token_logprobs
        if len(entries) != len(tokens) - start:
            raise InvalidResponse(
                f"{len(entries)} log-probs for {len(tokens) - start} input tokens"
            )
        for place, (log_prob, reported, _) in enumerate(entries[1:], start + 1):
            token = tokens[place]
            if log_prob is None or (reported != token and (token, reported) != (last, 0)):
                raise InvalidResponse(
                    f"the log-prob at {place} is {log_prob} of token {reported}, and the token "
                    f"there is {token}"
                )
            scores.append(log_prob)
    return tuple(scores)


def read_input_tokens(answer: bytes, rid: str) -> tuple[int, ...]:
    """The tokens that the server made of a text. Raises InvalidResponse."""
    with of_request(rid):
        entries = _read(_Scores, answer, rid).meta_info.input_token_logprobs
        return tuple(token for _, token, _ in entries)


def _read(model: type[A], data: bytes, rid: str) -> A:
    """Raises InvalidResponse, also for the response to another request."""
    answer = read(model, data)
    id = answer.meta_info.id
    if id is not None and not id.endswith(rid):  # some versions put a worker's number before it
        raise InvalidResponse(f"the response is to request {shown(id)}")
    return answer


def _log_probs(meta: _GenerationMeta, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """The log-prob of each token."""
    entries = meta.output_token_logprobs
    check_log_prob_tokens([entry[1] for entry in entries], tokens)
    return tuple([entry[0] for entry in entries])


def _sampling_masks(
    meta: _GenerationMeta, tokens: tuple[int, ...], sampling: SamplingParams, vocab_size: int
) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """The sampling mask of each token, [k] int32 in ascending order, and its log-prob within it."""
    if not tokens:
        return (), ()
    masks = meta.output_token_sampling_mask
    log_probs = meta.output_token_sampling_logprobs
    if masks is None or log_probs is None:
        raise InvalidResponse(
            "the server reports no sampling masks; SGLang 0.5.23 or newer does, without a router "
            "between"
        )
    if len(masks) != len(tokens) or len(log_probs) != len(tokens):
        raise InvalidResponse(
            f"{len(masks)} sampling masks and {len(log_probs)} log-probs for {len(tokens)} tokens"
        )
    found = []
    for place, (mask, token) in enumerate(zip(masks, tokens, strict=True)):
        kept = torch.tensor(sorted(mask), dtype=torch.int64)
        if token not in mask:
            raise InvalidResponse(f"token {place} is {token}, which its sampling mask lacks")
        if len(set(mask)) != len(mask) or (mask and max(mask) >= vocab_size):
            raise InvalidResponse(
                f"the sampling mask of token {place} has a token twice, or one that is not a token "
                f"id from 0 to {vocab_size - 1}"
            )
        if sampling.top_k == 1 and len(mask) > 1:
            raise InvalidResponse(f"the sampling mask of token {place} has {len(mask)} tokens")
        found.append(kept.int())
    return tuple(found), tuple(log_probs)


def _weight_versions(meta: _GenerationMeta, length: int, legal: Collection[int]) -> tuple[int, ...]:
    spans = meta.weight_versions
    if spans is None:
        spans = [VersionSpan(version=meta.weight_version, start=0, end=length)]
    return weight_versions(spans, length, legal)
