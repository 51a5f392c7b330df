"""Decode the routed experts in SGLang responses (`meta_info.routed_experts`), for router replay.

Format: see layer_choices.py; dense layers have an entry of zeros. Verified with SGLang 0.5.23:
`state_capturer/routed_experts.py`, `BatchResultProcessor._maybe_collect_routed_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime_like.checked_json import InvalidResponse
from slime_like.engines.base import GenerateOutput, GenerateRequest
from slime_like.servers.layer_choices import Report, read_choices, require_distinct

REPORT = Report(
    field="routed_experts",
    about="routed experts",
    topk="topk",
    missing="routed experts; start it with --enable-return-routed-experts, and with an MoE model",
    repeated="a token was routed to the same expert twice",
)


@dataclass(frozen=True, slots=True)
class RoutesFormat:
    """MoE shape of a model."""

    sparse: tuple[bool, ...]  # for every layer, whether it is an MoE layer
    topk: int  # experts per token, out of `experts` per layer
    experts: int

    def unknown(self, length: int) -> Tensor:
        """[length, MoE layers, topk] of -1, for tokens with unknown experts."""
        return torch.full((length, sum(self.sparse), self.topk), -1, dtype=torch.int16)


def read_routed_experts(
    encoded: str | None,
    request: GenerateRequest,
    output: GenerateOutput,
    expected: RoutesFormat,
) -> Tensor:
    """Routed experts [prompt and response tokens, MoE layers, topk] int16, -1 for the last token;
    all -1 for a request that was aborted in the server's queue. Raises InvalidResponse."""
    length = len(request.prompt_tokens) + len(output.tokens)
    numbers = read_choices(REPORT, encoded, request, output, len(expected.sparse), expected.topk)
    if numbers is None:
        return expected.unknown(length)
    experts = numbers[:, np.array(expected.sparse)]
    if experts.size and (experts.min() < 0 or experts.max() >= expected.experts):
        raise InvalidResponse(
            f"routed experts from {experts.min()} to {experts.max()}, expected 0 to "
            f"{expected.experts - 1}"
        )
    require_distinct(REPORT, experts)
    routed_experts = expected.unknown(length)
    routed_experts[:-1] = torch.from_numpy(experts.astype(np.int16))
    return routed_experts
