"""Which experts a server sent each token to, as its answers tell it: `meta_info.routed_experts`.

The base64 of int32 [tokens - 1, layers, topk], prompt and response together, in the machine's order
of bytes (little-endian wherever SGLang runs). All layers of the model have a place there, those
without experts one of zeros. The last token was never computed. Checked in SGLang
0.5.23: `state_capturer/routed_experts.py`, `BatchResultProcessor._maybe_collect_routed_experts`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime_like.rollout.engines.base import GenerateOutput, GenerateRequest
from slime_like.rollout.engines.checked_json import BadAnswer, shown


@dataclass(frozen=True, slots=True)
class RoutesFormat:
    """What a network has. sparse: of every layer, whether it has experts. topk: experts of a token,
    of `experts` in a layer."""

    sparse: tuple[bool, ...]
    topk: int
    experts: int

    def unknown(self, length: int) -> Tensor:
        """Routes of tokens that nobody computed."""
        return torch.full((length, sum(self.sparse), self.topk), -1, dtype=torch.int16)


def read_routes(
    meta: Mapping[str, object],
    request: GenerateRequest,
    output: GenerateOutput,
    expected: RoutesFormat,
    rid: str,
) -> Tensor:
    """[prompt and response tokens, expert layers, topk] int16, -1 for the last token. A request
    that was aborted where the server keeps nothing of it, in its queue, has -1 everywhere. Raises
    BadAnswer."""
    length = len(request.prompt_tokens) + len(output.tokens)
    encoded = meta.get("routed_experts")
    if output.finish_reason == "abort" and (encoded is None or not output.tokens):
        return expected.unknown(length)
    if not isinstance(encoded, str):
        raise BadAnswer(
            f"request {rid}: the server tells no routed experts; it has to be started with --enable-return-routed-experts, for a network with experts"
        )
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        raise BadAnswer(
            f"request {rid}: the routed experts are no base64 of whole numbers: {shown(encoded, 40)!r}"
        ) from None
    shape = (length - 1, len(expected.sparse), expected.topk)
    if numbers.size != shape[0] * shape[1] * shape[2]:
        raise BadAnswer(
            f"request {rid}: {numbers.size} routed experts where (tokens - 1, layers, experts of a token) = {shape} were expected"
        )
    known = numbers.reshape(shape)[:, np.array(expected.sparse)]
    if known.size and (known.min() < 0 or known.max() >= expected.experts):
        raise BadAnswer(
            f"request {rid}: routed experts from {known.min()} to {known.max()}; the network has 0 to {expected.experts - 1}"
        )
    in_order = np.sort(known, axis=-1)
    if (
        in_order[..., 1:] == in_order[..., :-1]
    ).any():  # as where the server's table was never written
        raise BadAnswer(f"request {rid}: a token was routed to the same expert twice")
    routes = expected.unknown(length)
    routes[:-1] = torch.from_numpy(known.astype(np.int16))
    return routes
