"""Validate bodies of asample and convert them to sampling commands."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from slime_like.tinker.data import (
    DataLimits,
    check_text,
    check_tokens,
    check_vocabulary,
    csr_rows,
    image_tokens,
    unsupported_chunk,
)
from slime_like.tinker.errors import Refused
from slime_like.tinker.schemas import Prompt, PromptChunk, Sample, SamplingParams, TensorData

MAX_TOP_K = 1024


def sample_body(request: Sample, limits: DataLimits) -> dict[str, object]:
    """Validate a sampling request; returns prompt, number of samples, seed and settings as plain
    values. Raises Refused."""
    if request.base_model is not None or request.model_path is not None:
        raise Refused(
            "base_model and model_path are arguments of create_sampling_session; the weights of a "
            "sampling session are fixed"
        )
    prompt, images = _prompt(request.prompt, limits)
    if images and (reads := _reads_of_prompt(request)):
        raise Refused(f"prompt: {reads} is not supported for a prompt with images")
    params = request.sampling_params
    check_tokens(prompt, "prompt", limits, room=params.max_tokens or 1)
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = limits.max_length - prompt.size
    if max_tokens * request.num_samples > limits.max_tokens:
        raise Refused(
            f"{request.num_samples} samples of up to {max_tokens} tokens are more than "
            f"{limits.max_tokens} (--max-request-tokens)"
        )
    record = bool(request.record_stability_info)
    if record and params.temperature != 1.0:
        raise Refused(
            f"temperature is {params.temperature:g}; samples for stable_reinforce "
            "(record_stability_info) need 1, which its log-probs are at"
        )
    return {
        "record": record,
        "images": images,
        "prompt": prompt.astype("<i4").tobytes(),
        "count": request.num_samples,
        "seeded": params.seed is not None,
        "seed": secrets.randbits(62) if params.seed is None else params.seed,
        "sampling": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": max_tokens,
            "report_sampling_mask": record and (params.top_k != -1 or params.top_p < 1),
            **_stops(params, limits),
        },
        # as in SkyRL, the most likely tokens of the prompt come with its own
        "prompt_log_probs": bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0,
        "last_n": _last_n(request, prompt.size),
        "targets": _targets(request.target_prompt_logprobs, prompt.size, limits),
        "alt_tokens": _alt_tokens(request.prompt_alt_tokens_k, prompt.size, limits),
        **_top_k(request, prompt.size, max_tokens, limits),
    }


def _prompt(prompt: Prompt, limits: DataLimits) -> tuple[NDArray[np.int64], list[bytes]]:
    """Token ids [N] and the files of the images. Raises Refused."""
    parts = [np.zeros(0, np.int64)]
    images = []
    for chunk in prompt.chunks:
        if chunk.type == "image" and limits.images is not None:
            data = _image_data(chunk)
            expected = (chunk.model_extra or {}).get("expected_tokens")
            parts.append(image_tokens(data, expected, "prompt", limits.images))
            images.append(data)
        elif chunk.type == "encoded_text" and chunk.tokens is not None and not chunk.model_extra:
            text = np.array(chunk.tokens, dtype=np.int64)
            check_text(text, "prompt", limits)
            parts.append(text)
        else:
            raise Refused(unsupported_chunk("prompt", chunk.type, limits))
    return np.concatenate(parts), images


def _image_data(chunk: PromptChunk) -> bytes:
    """The file of an image. Raises Refused."""
    from slime_like.images.files import ImageProblem, from_base64

    extra = chunk.model_extra or {}
    if unknown := sorted(extra.keys() - {"data", "format", "expected_tokens"}):
        raise Refused(f"prompt: image: {', '.join(unknown)} is not supported")
    try:
        return from_base64(str(extra.get("data", "")))
    except ImageProblem as error:
        raise Refused(f"prompt: image: data is {error}") from None


def _reads_of_prompt(request: Sample) -> str:
    """What a request asks for that is read from a pass over its tokens alone; "" for nothing."""
    asked = {
        "prompt_logprobs": request.prompt_logprobs,
        "topk_prompt_logprobs": request.topk_prompt_logprobs,
        "topk_sample_logprobs": request.topk_sample_logprobs,
        "target_prompt_logprobs": request.target_prompt_logprobs,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k,
    }
    return ", ".join(name for name, value in asked.items() if value)


def _top_k(request: Sample, length: int, max_tokens: int, limits: DataLimits) -> dict[str, int]:
    """Number of most likely tokens to return per position. Raises Refused.

    Args:
        length: Of the prompt.
        max_tokens: Of a sample.
    """
    max_k = min(MAX_TOP_K, limits.vocab_size)
    top_k = {}
    for part, positions in (("prompt", length), ("sample", max_tokens * request.num_samples)):
        k = getattr(request, f"topk_{part}_logprobs")
        if not 0 <= k <= max_k or k * positions > limits.max_tokens:
            raise Refused(
                f"topk_{part}_logprobs is {k}, at up to {positions} positions; must be 0 to "
                f"{max_k}, with at most {limits.max_tokens} log-probs in one request "
                "(--max-request-tokens)"
            )
        top_k[f"top_k_{part}"] = k
    return top_k


def _last_n(request: Sample, length: int) -> int | None:
    """Number of last prompt tokens to score; None for all. Raises Refused."""
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < length):
        raise Refused(
            f"prompt_logprobs_last_n is {last_n}, must be 1 to {length - 1}, with prompt_logprobs"
        )
    return last_n


def _alt_tokens(k: int, length: int, limits: DataLimits) -> int:
    """Number of tokens to draw at each position of the prompt. Raises Refused."""
    if not 0 <= k <= MAX_TOP_K or k * length > limits.max_tokens or (k and length < 2):
        raise Refused(
            f"prompt_alt_tokens_k is {k}, for a prompt of {length} tokens; must be 0 to "
            f"{MAX_TOP_K}, with at most {limits.max_tokens} draws in one request "
            "(--max-request-tokens), and a prompt of at least 2 tokens"
        )
    return k


def _targets(
    tensor: TensorData | None, length: int, limits: DataLimits
) -> dict[str, object] | None:
    """Tokens to score at positions of the prompt: row and token of every cell, -1 for none, and the
    layout of the answer. Raises Refused."""
    if tensor is None:
        return None
    name = "target_prompt_logprobs"
    if len(tensor.shape) != 2 or tensor.shape[0] != length - 1 or not tensor.shape[1]:
        raise Refused(f"{name} has shape {tensor.shape}, must be [{length - 1}, K]")
    rows, columns = tensor.shape
    layout: dict[str, object] = {"shape": tensor.shape}
    if (tensor.sparse_crow_indices is None) != (tensor.sparse_col_indices is None):
        raise Refused(f"{name}: give both sparse_crow_indices and sparse_col_indices, or neither")
    if max(len(tensor.data), rows if tensor.sparse_col_indices else rows * columns) > (
        limits.max_tokens
    ):
        raise Refused(f"{name} has more than {limits.max_tokens} cells (--max-request-tokens)")
    tokens = np.array(tensor.data, dtype=np.int64)
    if tensor.sparse_crow_indices is not None:
        ends = np.array(tensor.sparse_crow_indices, dtype=np.int64)
        of_columns = np.array(tensor.sparse_col_indices, dtype=np.int64)
        row_of = csr_rows(ends, of_columns, rows, columns, tokens.size, name)
        layout |= {"crow_indices": ends.tobytes(), "col_indices": of_columns.tobytes()}
    else:
        if tokens.size != rows * columns:
            raise Refused(f"{name} has {tokens.size} entries, its shape {rows * columns}")
        row_of = np.repeat(np.arange(rows), columns)
    check_vocabulary(tokens[tokens != -1], name, limits)
    if not (tokens != -1).any():
        raise Refused(f"{name} names no token")
    return {"rows": row_of.astype("<i8").tobytes(), "tokens": tokens.tobytes(), "layout": layout}


def _stops(params: SamplingParams, limits: DataLimits) -> dict[str, object]:
    """Stop conditions. None keeps the model's end tokens, an empty list disables them, other values
    are added."""
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = [s for s in stop or [] if isinstance(s, str)]
    tokens = [s for s in stop or [] if not isinstance(s, str)]
    if any(token >= limits.vocab_size for token in tokens):
        raise Refused(f"stop: a token is outside the vocabulary, 0 to {limits.vocab_size - 1}")
    return {"stop": texts, "stop_token_ids": tokens, "ignore_end_tokens": stop == []}
