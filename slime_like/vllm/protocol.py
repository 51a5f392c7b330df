"""Wire format of vLLM's /inference/v1/generate (tokens in, tokens out): request bodies, and
validation of responses token by token. Verified with vLLM 0.32."""

from __future__ import annotations

from typing import Annotated, cast, get_args

from pydantic import Field

from slime_like.checked_json import InvalidResponse, Items, LogProb, StrictModel, TokenId, read
from slime_like.engines.base import FinishReason, GenerateOutput, GenerateRequest, SamplingParams
from slime_like.servers.server_api import Legal, RefusedByServer
from slime_like.servers.token_checks import (
    VersionSpan,
    check_log_prob_tokens,
    check_tokens,
    of_request,
    weight_versions,
)
from slime_like.text import shown

PREFIX = "generate-tokens-"  # that the server puts before a request's id
_ANSWER_BYTES = 2**20  # size limit of a response without its tokens
_TOKEN_BYTES = 512  # size limit per token: id, log-prob (twice), rank


class _TokenLogProb(StrictModel):
    token_id: TokenId
    logprob: LogProb


class _LogProbs(StrictModel):
    content: Items[_TokenLogProb] = Field(default_factory=list)


class _Choice(StrictModel):
    finish_reason: str
    token_ids: Items[TokenId] = Field(default_factory=list)
    logprobs: _LogProbs | None = None
    weight_versions: Items[VersionSpan] | None = None


class _Usage(StrictModel):
    prompt_tokens: int


class _Generation(StrictModel):
    request_id: str
    choices: Annotated[Items[_Choice], Field(min_length=1, max_length=1)]
    usage: _Usage | None = None


def generation_body(
    request: GenerateRequest, sampling: SamplingParams, rid: str
) -> dict[str, object]:
    """The body of one request. The sampled tokens depend on the seed. Raises ValueError for images,
    routed experts and sampling masks."""
    if request.images:
        raise ValueError(f"sample {request.sample_id}: images are not sent to vLLM servers")
    if (
        sampling.report_routed_experts
        or sampling.report_indexer_topk
        or sampling.report_sampling_mask
    ):
        raise ValueError("routed experts and sampling masks are not asked for from vLLM servers")
    return {
        "request_id": rid,
        "token_ids": list(request.prompt_tokens),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_end_tokens,
            "seed": request.seed & (2**63 - 1),
            "logprobs": 0,  # of the sampled token alone
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        },
    }


def max_response_bytes(request: GenerateRequest, sampling: SamplingParams) -> int:
    """Size limit of the response in bytes."""
    tokens = len(request.prompt_tokens) + sampling.max_new_tokens
    return _ANSWER_BYTES + tokens * _TOKEN_BYTES


def read_generation(
    answer: bytes, request: GenerateRequest, sampling: SamplingParams, rid: str, legal: Legal
) -> GenerateOutput:
    """Validate a response and convert it to a `GenerateOutput`.

    Raises:
        InvalidResponse: Tokens, log-probs, counts and finish reason are inconsistent.
        WrongWeightVersion: A weight version is not `legal`.
        RefusedByServer: The server gave the request up.
    """
    with of_request(rid):
        generation = read(_Generation, answer)
        if not generation.request_id.endswith(rid):
            raise InvalidResponse(f"the response is to request {shown(generation.request_id)}")
        choice = generation.choices[0]
        if choice.finish_reason not in get_args(FinishReason):  # such as "error", "repetition"
            ended = shown(choice.finish_reason, 40)
            raise RefusedByServer(f"request {rid}: it ended as {ended}", 500)
        finish = cast(FinishReason, choice.finish_reason)
        tokens = tuple(choice.token_ids)
        check_tokens(tokens, sampling, legal.vocab_size, aborted=finish == "abort", key="token_ids")
        length = len(request.prompt_tokens)
        if generation.usage is not None and generation.usage.prompt_tokens != length:
            raise InvalidResponse(
                f"a prompt of {length} tokens, and the server read {generation.usage.prompt_tokens}"
            )
        entries = [] if choice.logprobs is None else choice.logprobs.content
        check_log_prob_tokens([entry.token_id for entry in entries], tokens)
        if choice.weight_versions is None and tokens:
            raise InvalidResponse("no weight versions; vLLM 0.32 or later reports them")
        return GenerateOutput(
            request.sample_id,
            tokens,
            tuple([entry.logprob for entry in entries]),
            finish,
            weight_versions(choice.weight_versions or [], len(tokens), legal.versions),
        )
