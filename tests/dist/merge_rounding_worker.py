"""Worker of tests/dist/test_merge_rounding.py: three versions of an adapter in bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.lora import LoraNetwork
from slime_like.megatron.lora import rounding as rounding_module
from slime_like.megatron.lora.gather import gather_factors, set_factors
from slime_like.megatron.lora.rounding import MergeRounding

STEP = 3e-4  # of a factor, from one version to the next


def layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Each layout of arguments["layouts"]: {name: flags}; rank 0 writes what it found."""
    rounding_module.BLOCK = 1000  # so that a weight has several blocks
    for name, flags in arguments["layouts"].items():
        with parallel(**sizes_of(flags)) as layout:
            config = settings(arguments["model"], f"--bf16 --lora-rank 3 --lora-alpha 6 {flags}")
            backend = MegatronBackend(config, layout, total_steps=1)
            network = backend.policy
            assert isinstance(network, LoraNetwork)
            rounding = MergeRounding(network)
            of_second = MergeRounding(network, 2)
            metrics, seconds, weights, factors = [], [], [], []
            generator = torch.Generator().manual_seed(5)
            for _ in range(3):
                moved = {
                    key: factor.float() + STEP * torch.randn(factor.shape, generator=generator)
                    for key, factor in gather_factors(network)
                }
                set_factors(network, moved)
                metrics.append(rounding.measure())
                metrics.append(rounding.measure())  # of the same adapter again
                seconds.append(of_second.measure())
                weights.append({key: w.clone() for key, w in backend.export_weights()})
                factors.append({key: f.clone() for key, f in gather_factors(network)})
            if rank == 0:
                found = {
                    "metrics": metrics,
                    "seconds": seconds,
                    "weights": weights,
                    "factors": factors,
                }
                torch.save(found, f"{arguments['out']}/{name}.pt")
    return {}
