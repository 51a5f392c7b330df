"""Workers of tests/dist/test_model_bases.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, train
from tests.dist.float64 import WithoutFloat32


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[str]]:
    """For every cell, by name, what three steps on the two bases have different, to the last bit."""
    found = {}
    for name, (folder, flags) in arguments["cells"].items():
        gpt, hybrid = (three_steps(folder, f"{flags} --model-base {b}") for b in ("gpt", "hybrid"))
        assert gpt.keys() == hybrid.keys()
        found[name] = [key for key, tensor in gpt.items() if not tensor.equal(hybrid[key])]
    dist.barrier()
    return found


def three_steps(folder: str, flags: str) -> dict[str, Tensor]:
    torch.manual_seed(1)  # of dropout; `parallel` sets the seeds of ranks
    with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
        numbers = train(folder, layout, flags, "float64")
    return {
        **{f"loss {n}": torch.tensor(x) for n, x in enumerate(numbers["losses"])},
        **{f"gradient norm {n}": torch.tensor(x) for n, x in enumerate(numbers["grad_norms"])},
        **{f"log-probs {n}": x for n, x in enumerate(numbers["log_probs"])},
        **numbers["gradients"],
        **numbers["weights"],
    }
