"""Workers of tests/search/test_layouts.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import differences, parallel, train
from slime_like.config import ConfigError
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.dist import lora_worker
from tests.dist.float64 import WithoutFloat32, settings


def train_in(layout: ParallelLayout, folder: str, flags: str) -> dict[str, Any]:
    """Three steps of the policy or, with --lora-rank, of its adapter, as
    `benchmarks.parity.steps.train` returns them."""
    if "--lora-rank" not in flags:
        return train(folder, layout, flags, "float64")
    found = lora_worker.train(folder, layout, flags)
    merged = {f"merged {name}": tensor for name, tensor in found["merged"].items()}
    return {**found, "weights": found["factors"] | merged, "grad_norms": found["norms"]}


def run_layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """For each of arguments["layouts"], how far its numbers are from those in the file
    arguments["base"], which one process writes; or what the arguments say who refuse it."""
    found: dict[str, Any] = {}
    for flags in arguments["layouts"]:
        words = f"{arguments['flags']} {flags}"
        try:
            settings(arguments["model"], f"--ref-load {arguments['model']} {words}")
        except ConfigError as refusal:
            found[flags] = str(refusal)
            continue
        with WithoutFloat32(), parallel(**sizes_of(words)) as layout:
            local = train_in(layout, arguments["model"], words)
        if world_size == 1:
            torch.save(local, arguments["base"])
            found[flags] = {}
            continue
        apart = differences(local, torch.load(arguments["base"]))
        found[flags] = {k: v for k, v in apart.items() if k != "metrics"}
    dist.barrier()
    return found
