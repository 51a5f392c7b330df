"""What tests/dist/test_families.py runs on several processes, and how it has float64 everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import differences, parallel, train


class WithoutFloat32(TorchFunctionMode):
    """megatron-core and transformers take norms, softmaxes, sigmoids and angles in float32,
    whatever the model is in: here in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        kwargs = kwargs or {}
        if func not in (torch.empty, torch.frombuffer, torch.Tensor.view):  # which read files
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args, kwargs = map(wide, args), {name: wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For every cell, by name, how far three steps in its layout are from those of one process."""
    found = {}
    for name, (folder, flags) in arguments["cells"].items():
        base_file = f"{folder}/one.pt"
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            mine = train(folder, layout, flags, "float64")
        if world_size == 1:
            torch.save(mine, base_file)
            continue
        apart = differences(mine, torch.load(base_file))
        found[name] = {k: v for k, v in apart.items() if k != "metrics"}
    dist.barrier()
    return found
