"""The wire format of SGLang's /generate: requests out, and answers checked token by token before they become outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from slime_like.rollout.engines.base import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
)

_SHOWN = 200  # characters of a bad answer in an error message
_NOTHING_NEW = {"temperature": 1.0, "max_new_tokens": 0}
_ROUNDING = 1e-3  # a log-prob may come out this far above 0


class BadAnswer(ValueError):
    """Status 200, and not what was asked for. The message quotes the request id."""


class Refused(ValueError):
    """The server ended the request by itself: out of memory, restarting. `status` is its code, 500 where it gives none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def generation_body(request: GenerateRequest, sampling: SamplingParams, rid: str) -> dict[str, Any]:
    """The JSON of one request. Seeds count only on servers with --sglang-enable-deterministic-inference. Raises ValueError for what SGLang cannot
    do: it knows no stop tokens while it ignores the model's."""
    if sampling.ignore_end_tokens and sampling.stop_token_ids:
        raise ValueError(
            f"SGLang ignores the stop tokens {list(sampling.stop_token_ids)} together with the model's end tokens; give one of the two"
        )
    extra = {"return_routed_experts": True} if sampling.report_routes else {}
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


def scoring_body(tokens: Sequence[int], rid: str, start: int = 0) -> dict[str, Any]:
    """Asks for the log-probs of `tokens` themselves, behind place `start`, at temperature 1 (SGLang knows no other for given tokens)."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": start,
        "sampling_params": dict(_NOTHING_NEW),
    }


def scoring_body_of_text(text: str, rid: str) -> dict[str, Any]:
    """As `scoring_body`, of the tokens that the server's own tokenizer makes of a text."""
    return {
        "rid": rid,
        "text": text,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": dict(_NOTHING_NEW),
    }


def read_generation(
    answer: Any, request: GenerateRequest, sampling: SamplingParams, rid: str
) -> GenerateOutput:
    """Raises BadAnswer where tokens, log-probs, versions and finish reason do not belong together, Refused where the server gave up."""
    meta = meta_of(answer, rid)
    finish, words = _finish_reason(meta, rid)
    if finish == "abort" and "status_code" in words and words["status_code"] is not None:
        raise Refused(
            f"request {rid}: {str(words.get('message'))[:_SHOWN]}", int(words["status_code"])
        )
    tokens = _token_ids(answer.get("output_ids"), rid, "output_ids")
    if len(tokens) > sampling.max_new_tokens or (not tokens and finish != "abort"):
        raise BadAnswer(
            f"request {rid}: {len(tokens)} tokens where 1 to {sampling.max_new_tokens} were asked for"
        )
    if meta.get("completion_tokens", len(tokens)) != len(tokens):
        raise BadAnswer(
            f"request {rid}: {len(tokens)} tokens, and the server counted {meta['completion_tokens']}"
        )
    if meta.get("prompt_tokens", len(request.prompt_tokens)) != len(request.prompt_tokens):
        raise BadAnswer(
            f"request {rid}: a prompt of {len(request.prompt_tokens)} tokens, and the server read {meta['prompt_tokens']}"
        )
    log_probs = _log_probs(meta.get("output_token_logprobs"), tokens, rid)
    return GenerateOutput(
        request.sample_id, tokens, log_probs, finish, _weight_versions(meta, len(tokens), rid)
    )


def vocabulary_body(token: int, rid: str) -> dict[str, Any]:
    """Is refused with status 400 by a server whose vocabulary does not have the token; `scoring_body` is not, and tells another one's log-prob."""
    return {**scoring_body([0], rid), "token_ids_logprob": [token]}


def read_scores(
    answer: Any, tokens: Sequence[int], rid: str, start: int = 0, last: int | None = None
) -> tuple[float, ...]:
    """Log-probs of tokens[start + 1:]. last: a token that may come back as 0, as SGLang names the last one of its vocabulary here. Raises BadAnswer."""
    scored = tuple(tokens[start + 1 :])
    entries = meta_of(answer, rid).get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens) - start:
        found = f"{len(entries)} log-probs" if isinstance(entries, list) else "no log-probs"
        raise BadAnswer(f"request {rid}: {found} for {len(tokens) - start} input tokens")
    named = [
        [entry[0], token]
        if token == last and isinstance(entry, list) and entry[1:2] == [0]
        else entry
        for entry, token in zip(entries[1:], scored, strict=True)
    ]
    return _log_probs(named, scored, rid)


def read_input_tokens(answer: Any, rid: str) -> tuple[int, ...]:
    """What the server's tokenizer made of a text. Raises BadAnswer."""
    entries = meta_of(answer, rid).get("input_token_logprobs")
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) > 1 for entry in entries
    ):
        raise BadAnswer(f"request {rid}: no log-probs of input tokens: {str(entries)[:_SHOWN]!r}")
    return _token_ids([entry[1] for entry in entries], rid, "input tokens")


def meta_of(answer: Any, rid: str) -> Mapping[str, Any]:
    """Raises BadAnswer."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise BadAnswer(f"request {rid}: no answer of /generate: {str(answer)[:_SHOWN]!r}")
    return answer["meta_info"]


def _finish_reason(meta: Mapping[str, Any], rid: str) -> tuple[FinishReason, Mapping[str, Any]]:
    words = meta.get("finish_reason")
    kind = words.get("type") if isinstance(words, dict) else None
    if not isinstance(words, dict) or kind not in get_args(FinishReason):
        raise BadAnswer(f"request {rid}: unknown finish_reason {str(words)[:_SHOWN]!r}")
    return cast(FinishReason, kind), words


def _token_ids(values: Any, rid: str, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise BadAnswer(f"request {rid}: {name} are no token ids: {str(values)[:_SHOWN]!r}")
    return tuple(values)


def _log_probs(entries: Any, tokens: tuple[int, ...], rid: str) -> tuple[float, ...]:
    """Of [log_prob, token id, ...] entries, one for each of `tokens` in its order."""
    if not isinstance(entries, list) or len(entries) != len(tokens):
        found = len(entries) if isinstance(entries, list) else "no"
        raise BadAnswer(f"request {rid}: {found} log-probs for {len(tokens)} tokens")
    values = []
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise BadAnswer(
                f"request {rid}: the log-prob at {place} is {str(entry)[:_SHOWN]!r}, and the token there is {token}"
            )
        value = entry[0]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value > _ROUNDING
        ):
            raise BadAnswer(f"request {rid}: the log-prob of token {place} is {value!r}")
        values.append(float(value))
    return tuple(values)


def _weight_versions(meta: Mapping[str, Any], length: int, rid: str) -> tuple[int, ...]:
    """Of every token, from `weight_versions` (spans) or, where the server does not give them, from `weight_version` (one for all)."""
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    versions: list[int] = []
    try:
        for span in spans:
            if span["start"] != len(versions) or span["end"] < span["start"]:
                raise ValueError
            versions += [int(span["version"])] * (span["end"] - span["start"])
    except (KeyError, TypeError, ValueError):
        raise BadAnswer(
            f"request {rid}: the weight versions {str(spans)[:_SHOWN]!r} are not ones that were sent"
        ) from None
    if len(versions) != length:
        raise BadAnswer(
            f"request {rid}: weight versions of {len(versions)} tokens for {length} tokens"
        )
    return tuple(versions)
