"""What tests/dist/test_moe.py runs on several processes: a `MegatronBackend` with experts, in layout after layout."""

from __future__ import annotations

from typing import Any

import torch

from slime_like.megatron_backend.backend import MegatronBackend
from slime_like.megatron_backend.layout import ParallelLayout
from tests.dist.backend_worker import random_samples, settings, share, weights
from tests.dist.convert_worker import parallel

GRADIENTS = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0 --lr 1"  # one step moves every weight by its gradient
ADAM_ONLY = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
ADAM = "--adam-eps 1e-6 --lr 3e-4"


def sizes_of(flags: str) -> dict[str, int]:
    """What `parallel` is to make, by the flags of the run."""
    words = flags.split()
    names = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "vp": "--num-virtual-stages-per-pipeline-rank",
        "ep": "--expert-model-parallel-size",
        "etp": "--expert-tensor-parallel-size",
        "cp": "--context-parallel-size",
    }
    return {short: int(words[words.index(name) + 1]) for short, name in names.items() if name in words}


def gradients(folder: str, layout: ParallelLayout, flags: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradient of every Hugging Face tensor) of one optimizer step, which is one of plain gradient descent."""
    own = " ".join(word for word in flags.split() if word not in ADAM_ONLY)
    backend = MegatronBackend(settings(folder, f"{own} {GRADIENTS}"), layout, total_steps=8)
    before = weights(backend)
    result = backend.update(share(random_samples(1), layout))
    return result.metrics["loss"], {name: before[name] - after for name, after in weights(backend).items()}


def three_steps(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    backend = MegatronBackend(settings(folder, f"{flags} {ADAM}"), layout, total_steps=8)
    steps = [backend.update(share(random_samples(seed), layout)) for seed in (1, 2, 3)]
    return dict(losses=[s.metrics["loss"] for s in steps], grad_norms=[s.grad_norm for s in steps], weights=weights(backend))


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """For every case, by name: loss and gradients of a step; losses, gradient norms and weights of three. Rank 0 writes them to `out`."""
    results: dict[str, Any] = {}
    for name, (folder, flags) in arguments["cases"].items():
        with parallel(**sizes_of(flags)) as layout:
            loss, grads = gradients(folder, layout, flags)
            results[name] = dict(loss=loss, gradients=grads, **three_steps(folder, layout, flags))
    if rank == 0:
        torch.save(results, arguments["out"])
