"""Tokens sorted by expert without a wait for the device.

Target    transformer.moe.moe_utils: permute, also as transformer.moe.token_dispatcher: permute.
Why       It selects tokens and probabilities by a mask. How many there are is read from the device,
          twice in each MoE layer, although the dispatcher knows it: without dropped tokens it is
          the number of tokens times the experts of each.
Without   Two waits per MoE layer and micro-batch, on top of the one for the tokens of each expert.
How       The places of the mask by an operation of a given size. Order and values are those of
          megatron-core. Fused, padded and counted on the device (capacity): megatron-core's own.
When      Always.
Versions  megatron-core 0.16.1; 0.17 selects by a given size itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_patches.patch import ALWAYS, Patch, find

NAME = "moe_permute"
UTILS = "transformer.moe.moe_utils"
DISPATCHER = "transformer.moe.token_dispatcher"


def sort_by_expert(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The `count` chosen tokens [count, H], their probabilities [count], and their rows in
    `tokens`, experts in order and each expert's tokens in order.

    Args:
        tokens: [T, H].
        routing_map: [T, E] bool, with `count` True values.
        probs: [T, E].
    """
    by_expert = routing_map.bool().T.reshape(-1)  # [E * T]
    places = torch.nonzero_static(by_expert, size=count).squeeze(1)
    rows = places % tokens.size(0)
    chosen = None if probs is None else probs.T.reshape(-1).index_select(0, places)
    return tokens.index_select(0, rows), chosen, rows


def check() -> None:
    for module in (UTILS, DISPATCHER):
        find(NAME, f"{module}:permute")


def install() -> None:
    original = find(NAME, f"{UTILS}:permute")

    @functools.wraps(original)
    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Any:
        if fused or drop_and_pad or not isinstance(num_out_tokens, int):
            return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
        return sort_by_expert(tokens, routing_map, probs, num_out_tokens)

    for module in (UTILS, DISPATCHER):
        find(NAME, module).permute = permute


PATCH = Patch(NAME, ALWAYS, check, install, fixed_in="0.17")
