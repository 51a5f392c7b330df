"""Wire format of SGLang's /generate: request bodies, and validation of responses token by token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from slime_like.checked_json import (
    InvalidResponse,
    WrongWeightVersion,
    check_weight_versions,
    is_int_between,
    log_prob,
    printable,
    shown,
    token_ids,
)
from slime_like.engines.base import FinishReason, GenerateOutput, GenerateRequest, SamplingParams

_NOTHING_NEW = {"temperature": 1.0, "max_new_tokens": 0}
_NO_LIMIT = 2**31  # bound of token ids if the vocabulary size is unknown
_ANSWER_BYTES = 2**20  # size limit of a response without its tokens
_TOKEN_BYTES = 512  # size limit per token: id, log-prob, text and weight version


@dataclass(frozen=True, slots=True)
class Legal:
    """Legal content of a response. versions: weight versions that the server may have had."""

    vocab_size: int
    versions: Collection[int]


class RefusedByServer(ValueError):
    """The server aborted the request itself (out of memory, restart). `status`: its status code,
    500 if it gave none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def generation_body(
    request: GenerateRequest, sampling: SamplingParams, rid: str
) -> dict[str, object]:
    """The body of one request. Seeds only take effect with --sglang-enable-deterministic-inference.
    Raises ValueError for stop tokens with ignore_end_tokens, which SGLang does not support."""
    if sampling.ignore_end_tokens and sampling.stop_token_ids:
        raise ValueError(
            f"SGLang's ignore_eos also ignores the stop tokens {list(sampling.stop_token_ids)}; "
            "use either ignore_end_tokens or stop_token_ids"
        )
    extra = {"return_routed_experts": True} if sampling.report_routed_experts else {}
    return extra | {
        "rid": rid,
        "input_ids": list(request.prompt_tokens),
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
    """Size limit of the response in bytes. token_bytes: bytes of routed experts per token."""
    tokens = len(request.prompt_tokens) + sampling.max_new_tokens
    return _ANSWER_BYTES + tokens * (_TOKEN_BYTES + token_bytes)


def read_generation(
    answer: Any, request: GenerateRequest, sampling: SamplingParams, rid: str, legal: Legal
) -> GenerateOutput:
    """Validate a response and convert it to a `GenerateOutput`.

    Raises:
        InvalidResponse: Tokens, log-probs, counts and finish reason are inconsistent.
        WrongWeightVersion: A weight version is not `legal`.
        Refused: The server aborted the request.
    """
    meta = meta_of(answer, rid)
    finish, reason = _finish_reason(meta, rid)
    status = reason.get("status_code")
    if finish == "abort" and status is not None:
        if not is_int_between(status, 100, 599):
            raise InvalidResponse(f"request {rid}: status_code {shown(status)} of an abort")
        raise RefusedByServer(f"request {rid}: {printable(str(reason.get('message')))}", status)
    tokens = token_ids(answer.get("output_ids"), f"request {rid}: output_ids", legal.vocab_size)
    if len(tokens) > sampling.max_new_tokens or (not tokens and finish != "abort"):
        raise InvalidResponse(
            f"request {rid}: {len(tokens)} tokens, expected 1 to {sampling.max_new_tokens}"
        )
    counted = meta.get("completion_tokens", len(tokens))
    if counted != len(tokens):
        raise InvalidResponse(
            f"request {rid}: {len(tokens)} tokens, and the server counted {shown(counted)}"
        )
    read = meta.get("prompt_tokens", len(request.prompt_tokens))
    if read != len(request.prompt_tokens):
        raise InvalidResponse(
            f"request {rid}: a prompt of {len(request.prompt_tokens)} tokens, and the server read "
            f"{shown(read)}"
        )
    log_probs = _log_probs(meta.get("output_token_logprobs"), tokens, rid)
    versions = _weight_versions(meta, len(tokens), rid)
    check_weight_versions(versions, legal.versions, f"request {rid}")
    return GenerateOutput(request.sample_id, tokens, log_probs, finish, versions)


def vocabulary_body(token: int, rid: str) -> dict[str, object]:
    """A request that a server rejects with status 400 if `token` is not in its vocabulary.
    `scoring_body` would instead return the log-prob of another token."""
    return {**scoring_body([0], rid), "token_ids_logprob": [token]}


def read_scores(
    answer: object, tokens: Sequence[int], rid: str, start: int = 0, last: int | None = None
) -> tuple[float, ...]:
    """Log-probs of tokens[start + 1:]. last: the last token of the vocabulary, which SGLang may
    report as 0 here. Raises InvalidResponse."""
    scored = tuple(tokens[start + 1 :])
    entries = meta_of(answer, rid).get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens) - start:
        count = f"{len(entries)} log-probs" if isinstance(entries, list) else "no log-probs"
        raise InvalidResponse(f"request {rid}: {count} for {len(tokens) - start} input tokens")
    named = [
        [entry[0], token]
        if token == last and isinstance(entry, list) and entry[1:2] == [0]
        else entry
        for entry, token in zip(entries[1:], scored, strict=True)
    ]
    return _log_probs(named, scored, rid)


def read_input_tokens(answer: object, rid: str) -> tuple[int, ...]:
    """The tokens that the server made of a text. Raises InvalidResponse."""
    entries = meta_of(answer, rid).get("input_token_logprobs")
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) > 1 for entry in entries
    ):
        raise InvalidResponse(f"request {rid}: no log-probs of input tokens: {shown(entries)}")
    return token_ids([entry[1] for entry in entries], f"request {rid}: input tokens", _NO_LIMIT)


def meta_of(answer: object, rid: str) -> Mapping[str, object]:
    """The meta_info of a response. Raises InvalidResponse, also for the response to another
    request."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise InvalidResponse(f"request {rid}: no answer of /generate: {shown(answer)}")
    meta = answer["meta_info"]
    if not str(meta.get("id", rid)).endswith(rid):  # some versions put a worker's number before it
        raise InvalidResponse(f"request {rid}: the response is to request {shown(meta['id'])}")
    return meta


def _finish_reason(
    meta: Mapping[str, object], rid: str
) -> tuple[FinishReason, Mapping[str, object]]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or kind not in get_args(FinishReason):
        raise InvalidResponse(f"request {rid}: unknown finish_reason {shown(reason)}")
    return cast(FinishReason, kind), reason


def _log_probs(entries: object, tokens: tuple[int, ...], rid: str) -> tuple[float, ...]:
    """Log-probs from [log_prob, token id, ...] entries, one for each of `tokens`, in order."""
    if not isinstance(entries, list) or len(entries) != len(tokens):
        count = len(entries) if isinstance(entries, list) else "no"
        raise InvalidResponse(f"request {rid}: {count} log-probs for {len(tokens)} tokens")
    values = []
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise InvalidResponse(
                f"request {rid}: the log-prob at {place} is {shown(entry)}, and the token there is "
                f"{token}"
            )
        values.append(log_prob(entry[0], f"request {rid}: the log-prob of token {place}"))
    return tuple(values)


def _weight_versions(meta: Mapping[str, object], length: int, rid: str) -> tuple[int, ...]:
    """Weight version of every token, from `weight_versions` (spans) or, in its absence,
    `weight_version` (one for all tokens)."""
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    if not isinstance(spans, list):
        raise InvalidResponse(f"request {rid}: weight_versions is not a list: {shown(spans)}")
    versions: list[int] = []
    for span in spans:
        start, end = (span.get(key) if isinstance(span, dict) else None for key in ("start", "end"))
        if start != len(versions) or not is_int_between(end, len(versions), length):
            raise InvalidResponse(
                f"request {rid}: the weight versions {shown(spans)} are none of {length} tokens"
            )
        if end > len(versions):
            versions += [_version(span.get("version"), rid)] * (end - len(versions))
    if len(versions) != length:
        raise InvalidResponse(
            f"request {rid}: weight versions of {len(versions)} tokens for {length} tokens"
        )
    return tuple(versions)


def _version(value: object, rid: str) -> int:
    """Parse a weight version, an integer or its text. Raises WrongWeightVersion for other text,
    e.g. from a server that never received weights; InvalidResponse for other types."""
    if type(value) is int:
        return value
    if not isinstance(value, str):
        raise InvalidResponse(f"request {rid}: weight version {shown(value)}")
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise WrongWeightVersion(f"request {rid}: the weight version {shown(value)} was never sent")
    return int(value)
