"""Decode what the layers of a model chose for each token, as SGLang reports it: base64 of int32
[tokens - 1, layers, topk] over prompt and response, little-endian. The last token was never fed to
the model."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_like.checked_json import InvalidResponse
from slime_like.engines.base import GenerateOutput, GenerateRequest
from slime_like.text import shown


@dataclass(frozen=True, slots=True)
class Report:
    """A field of responses with choices of layers, in words for messages."""

    field: str  # of `meta_info`
    about: str  # such as "routed experts"
    topk: str  # name of its last dimension
    missing: str  # what a server without the field lacks, and how to start it
    repeated: str  # what is wrong with a choice made twice


def read_choices(
    report: Report,
    encoded: str | None,
    request: GenerateRequest,
    output: GenerateOutput,
    layers: int,
    topk: int,
) -> NDArray[Any] | None:
    """[tokens - 1, layers, topk] int32; None for a request that was aborted in the server's queue.
    Raises InvalidResponse."""
    if output.finish_reason == "abort" and (encoded is None or not output.tokens):
        return None
    if encoded is None:
        raise InvalidResponse(f"the server reports no {report.missing}")
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        text = shown(encoded, 40)
        raise InvalidResponse(f"{report.field} is not base64 of int32: {text!r}") from None
    shape = (len(request.prompt_tokens) + len(output.tokens) - 1, layers, topk)
    if numbers.size != shape[0] * shape[1] * shape[2]:
        raise InvalidResponse(
            f"{numbers.size} {report.about}, expected (tokens - 1, layers, {report.topk}) = {shape}"
        )
    return numbers.reshape(shape)


def require_distinct(report: Report, choices: NDArray[Any]) -> None:
    """Raise InvalidResponse if a layer chose the same twice for a token, e.g. because the server's
    buffer was never written. choices: [tokens, layers, topk]."""
    ranked = np.sort(choices, axis=-1)
    if (ranked[..., 1:] == ranked[..., :-1]).any():
        raise InvalidResponse(report.repeated)
