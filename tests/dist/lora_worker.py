"""Workers of tests/dist/test_lora.py: a policy with LoRA in every layout, from the same initial
state."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import (
    STEPS,
    parallel,
    share,
    train_samples,
    weights,
    whole_gradients,
)
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.lora import LoraNetwork
from slime_like.megatron.lora.gather import gather_factors, set_factors
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import TrainBatch
from tests.dist.float64 import WithoutFloat32, settings

COMMON = (
    "--lora-rank 3 --lora-alpha 6 --lr 3e-3 --adam-eps 1e-6 --weight-decay 0.1 --clip-grad 1.0 --entropy-coef 0.01 --use-kl-loss "
    "--kl-loss-coef 0.3 "
)


def make_backend(folder: str, layout: ParallelLayout, flags: str) -> MegatronBackend:
    return MegatronBackend(settings(folder, COMMON + flags), layout, total_steps=STEPS)


def adapter_of(backend: MegatronBackend) -> LoraNetwork:
    assert isinstance(backend.policy, LoraNetwork)
    return backend.policy


def factors(backend: MegatronBackend) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in gather_factors(adapter_of(backend))}


def gradients(backend: MegatronBackend) -> dict[str, Tensor]:
    backend.trained.reduce_gradients()
    for module in backend.trained.trained_modules:
        whole_gradients(module)
    return {
        name: g.float() for name, g in gather_factors(adapter_of(backend), attrgetter("main_grad"))
    }


def start_from_noise(backend: MegatronBackend) -> None:
    """Second factors that are not zero, so that gradients reach the first ones at once."""
    g = torch.Generator().manual_seed(11)
    found = factors(backend)
    noisy = {n: t + 0.1 * torch.randn(t.shape, generator=g) for n, t in found.items()}
    set_factors(adapter_of(backend), noisy)


def train(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """As benchmarks/parity/steps.py's, of the adapter."""
    backend = make_backend(folder, layout, flags)
    first = factors(backend)
    start_from_noise(backend)
    samples = share(train_samples(1), layout).samples
    log_probs = [s.log_probs for s in backend.forward(samples)]
    assert backend.reference is not None
    reference = [s.log_probs for s in backend.forward(samples, backend.reference)]
    losses, norms, metrics = [], [], []
    found: dict[str, Tensor] = {}
    for step in range(1, STEPS + 1):
        pending = backend.forward_backward(TrainBatch(share(train_samples(step), layout).samples))
        found |= {f"step {step} {name}": g for name, g in gradients(backend).items()}
        losses.append(pending.metrics["loss"])
        metrics.append(pending.metrics)
        result = backend.optim_step(pending)
        assert not result.skipped
        norms.append(result.grad_norm)
    return dict(
        first=first, losses=losses, gradients=found, factors=factors(backend), merged=weights(backend), norms=norms, metrics=metrics,
        log_probs=log_probs, reference=reference, dp=(layout.dp_rank, layout.dp_size),
    )  # fmt: skip


def layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Each layout of arguments["layouts"]: {name: flags}; rank 0 writes what it found."""
    for name, flags in arguments["layouts"].items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            torch.save(
                train(arguments["model"], layout, flags), f"{arguments['out']}/{name}-{rank}.pt"
            )
    return {}
