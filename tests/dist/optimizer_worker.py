"""Workers of tests/dist/test_optimizer_memory.py: the same steps with megatron-core's optimizer and
with others."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings, share, train_samples, weights
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.dist.backend_worker import poison_one_rank

COMMON = "--bf16 --use-distributed-optimizer --lr 1e-3 --weight-decay 0.1 --clip-grad 0.5 --adam-beta2 0.98"


def steps(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """Two steps, one that is skipped, and another two. Norms, and the weights after them."""
    backend = MegatronBackend(settings(folder, f"{COMMON} {flags}"), layout, total_steps=5)
    norms = []
    for step in range(1, 6):
        handle = (
            poison_one_rank(backend.policy, layout.world_size - 1, float("nan"))
            if step == 3
            else None
        )
        result = backend.update(share(train_samples(step), layout))
        if handle is not None:
            handle.remove()
        assert result.skipped == (step == 3)
        norms.append(result.grad_norm)
    return {"norms": [norm for i, norm in enumerate(norms) if i != 2], "weights": weights(backend)}


def compare(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By layout and kind of state: the largest difference of norms and the relative one of all
    weights from megatron-core's own."""
    found: dict[str, Any] = {}
    for name, (folder, flags) in arguments["layouts"].items():
        with parallel(**sizes_of(flags)) as layout:
            plain = steps(folder, layout, flags)
            for kind, more in arguments["kinds"].items():
                other = steps(folder, layout, f"{flags} {more}")
                apart = (
                    sum(
                        float((other["weights"][n] - w).norm() ** 2)
                        for n, w in plain["weights"].items()
                    )
                    ** 0.5
                )
                size = sum(float(w.norm() ** 2) for w in plain["weights"].values()) ** 0.5
                found[f"{name}, {kind}"] = [
                    max(
                        abs(a / b - 1) for a, b in zip(other["norms"], plain["norms"], strict=True)
                    ),
                    apart / size,
                ]
    torch.distributed.barrier()
    return found
