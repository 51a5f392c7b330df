"""What a test does to a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def one_weight(rank: int) -> None:
    """Every update has one wrong weight: a layer's output projection, twice as large."""
    from slime_like.megatron_backend.backend import MegatronBackend

    right = MegatronBackend.export_weights

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in right(self, *args, **kwargs):
            yield name, tensor * 2 if name == "model.layers.0.self_attn.o_proj.weight" else tensor

    MegatronBackend.export_weights = wrong  # type: ignore[method-assign]
