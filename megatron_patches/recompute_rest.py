"""Full recomputation in groups of layers (`--recompute-method uniform`) where the layers of a stage
are no multiple of the group.

Target    transformer.transformer_block: TransformerBlock._get_layer.
Why       `_checkpointed_forward` takes `recompute_num_layers` layers for the last group too, and
          asks for some beyond the last.
Without   IndexError in the first step, on this stage; the others wait for it.
How       What lies beyond the last layer changes nothing.
When      Always.
Versions  megatron-core 0.16; fixed in 0.17.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_patches.patch import ALWAYS, Patch, find, missing

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlock


NAME = "recompute_rest"
CLASS = "transformer.transformer_block:TransformerBlock"


def check() -> None:
    find(NAME, f"{CLASS}._get_layer")
    target = f"{CLASS}._checkpointed_forward"
    if "num_layers_per_pipeline_rank" not in find(NAME, target).__code__.co_names:
        raise missing(NAME, f"megatron.core.{target} no longer counts the layers of a stage")


def install() -> None:
    original = find(NAME, f"{CLASS}._get_layer")

    @functools.wraps(original)
    def get_layer(self: TransformerBlock, layer_number: int) -> object:
        return original(self, layer_number) if layer_number < len(self.layers) else _no_layer

    find(NAME, CLASS)._get_layer = get_layer


def _no_layer(
    *, hidden_states: torch.Tensor, context: torch.Tensor | None, **others: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return hidden_states, context


PATCH = Patch(NAME, ALWAYS, check, install, fixed_in="0.17")
