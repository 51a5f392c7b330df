"""What a test does to a run before it starts, or looks at in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor


def one_weight(rank: int) -> None:
    """Every update has one wrong weight: a layer's output projection, twice as large."""
    change_exports(
        lambda name, tensor: (
            name,
            tensor * 2 if name == "model.layers.0.self_attn.o_proj.weight" else tensor,
        )
    )


def two_experts(rank: int) -> None:
    """In every update two experts of a layer have each other's names."""
    places = {
        "model.layers.1.mlp.experts.0.": "model.layers.1.mlp.experts.1.",
        "model.layers.1.mlp.experts.1.": "model.layers.1.mlp.experts.0.",
    }

    def exchanged(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        found = next((place for place in places if name.startswith(place)), None)
        return (name if found is None else places[found] + name.removeprefix(found)), tensor

    change_exports(exchanged)


def count_what_is_left(rank: int, file: str, *urls: str) -> None:
    """After each rollout a line of `file` says how many requests each server still works on."""
    from slime_like.rollout.collector import Collector
    from tests.sglang.conftest import running

    collect = Collector.collect

    def and_count(self: Any, rollout_id: int) -> Any:
        collected = collect(self, rollout_id)
        if rank == 0:
            with Path(file).open("a") as lines:
                lines.write(json.dumps([running(url) for url in urls]) + "\n")
        return collected

    Collector.collect = and_count  # type: ignore[method-assign]


def change_exports(change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    from slime_like.megatron.backend import MegatronBackend

    right = MegatronBackend.export_weights

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return (change(name, tensor) for name, tensor in right(self, *args, **kwargs))

    MegatronBackend.export_weights = wrong  # type: ignore[method-assign]
