"""Workers of tests/dist/test_flag_pairs.py: train with the flags of several features, and compare
with one process without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import differences, parallel, train
from tests.dist.float64 import WithoutFloat32

WORDS = ("loss", "gradients", "weights", "log_probs")


def one_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    with WithoutFloat32(), parallel() as layout:
        torch.save(
            {
                name: train(folder, layout, "--micro-batch-size 1", "float64")
                for name, folder in arguments["models"].items()
            },
            arguments["base"],
        )


def on_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By flags, the largest difference of each thing compared. Those of the same groups are run
    together."""
    base, found = torch.load(Path(arguments["base"])), {}
    cases: dict[tuple[tuple[str, int], ...], list[tuple[str, str]]] = {}
    for model, flags in arguments["cases"]:
        cases.setdefault(tuple(sizes_of(flags).items()), []).append((model, flags))
    for sizes, own in cases.items():
        with WithoutFloat32(), parallel(**dict(sizes)) as layout:
            for model, flags in own:
                local = train(arguments["models"][model], layout, flags, "float64")
                seen = differences(local, base[model])
                found[f"{model} {flags}"] = {word: seen[word] for word in WORDS}
    return found
