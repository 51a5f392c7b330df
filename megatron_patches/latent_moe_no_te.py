"""Experts on a projection of the hidden state, without Transformer Engine: the two projections.

Target    transformer.moe.moe_layer: the globals HAVE_TE and TELinear.
Why       MoELayer builds the projections of `moe_latent_size` as Transformer Engine's linear layer
          with a copy on each rank, and asserts that it is there.
Without   Building such a layer raises AssertionError.
How       The same layer in torch. Under sequence parallelism each rank projects its own rows, so
          its weight is marked: megatron-core sums the gradients of marked weights over the ranks.
When      No Transformer Engine.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_patches.patch import NO_TE, Patch, find, missing

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

NAME = "latent_moe_no_te"
MODULE = "transformer.moe.moe_layer"


class CopiedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank has whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **_: object,
    ) -> None:
        super().__init__()
        assert not bias, "no supported model has one"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        if config.perform_initialization:
            init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """As megatron-core's linear layers: with a bias, which is None."""
        return torch.nn.functional.linear(x, self.weight), None


def check() -> None:
    target = f"{MODULE}:MoELayer.__init__"
    names = find(NAME, target).__code__.co_names
    if not {"HAVE_TE", "TELinear", "fc1_latent_proj"} <= set(names):
        raise missing(NAME, f"megatron.core.{target} no longer reads HAVE_TE and TELinear")


def install() -> None:
    module = find(NAME, MODULE)
    module.HAVE_TE = True
    module.TELinear = CopiedLinear


PATCH = Patch(NAME, NO_TE, check, install)
