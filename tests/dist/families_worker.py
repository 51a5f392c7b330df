"""Workers of tests/dist/test_families.py."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import differences, parallel, train
from tests.dist.float64 import WithoutFloat32


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For every cell, by name, how far three steps in its layout are from those of one process."""
    found = {}
    for name, (folder, flags) in arguments["cells"].items():
        base_file = f"{folder}/one.pt"
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            local = train(folder, layout, flags, "float64")
        if world_size == 1:
            torch.save(local, base_file)
            continue
        apart = differences(local, torch.load(base_file))
        found[name] = {k: v for k, v in apart.items() if k != "metrics"}
    dist.barrier()
    return found


def layers_left(rank: int, world_size: int, arguments: dict[str, Any]) -> int:
    """MoE layers that are still alive after a training that is over."""
    with parallel() as layout:
        train(arguments["folder"], layout, "--micro-batch-size 2")
    gc.collect()
    return sum(isinstance(found, MoELayer) for found in gc.get_objects())
