"""Workers of tests/dist/test_muon.py."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import (
    differences,
    gradients,
    parallel,
    settings,
    share,
    train,
    train_samples,
    weights,
)
from slime_like.megatron.backend import MegatronBackend

# in bf16 (the default) the iteration itself is accurate to two digits
EXACT = "--optimizer muon --muon-fp32-matmul-prec highest"


def two_steps(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """Weights before and after, and both steps' gradients, by Hugging Face name, in files."""
    config = settings(arguments["model"], arguments["flags"])
    with parallel() as layout:
        backend = MegatronBackend(config, layout, total_steps=2)
        found = {"before": weights(backend)}
        for step in (1, 2):
            pending = backend.forward_backward(share(train_samples(step), layout))
            found[f"gradients {step}"] = gradients(backend)
            assert not backend.optim_step(pending).skipped
        found["after"] = weights(backend)
    torch.save(found, arguments["out"])
    return list(found)


def layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How far each layout is from what one process has written, or with one rank: that."""
    found = {}
    for name, (model, flags) in arguments["cases"].items():
        with parallel(**sizes_of(flags)) as layout:
            trained = train(model, layout, f"{EXACT} {flags}")
        if world_size == 1:
            torch.save(trained, f"{model}/base.pt")
        else:
            base = torch.load(f"{model}/base.pt", weights_only=False)
            apart = differences(trained, base)
            found[name] = {k: apart[k] for k in ("loss", "grad_norm", "weights", "all_weights")}
    torch.distributed.barrier()
    return found
