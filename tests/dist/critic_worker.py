"""Workers of tests/dist/test_critic.py: the critic of a `MegatronBackend` on random samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.steps import parallel
from slime_like.guards.update import SkippedStepGuard
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import TrainSample
from slime_like.weights.hf_export import HfExport
from tests.dist.backend_worker import poison_one_rank, random_samples, share
from tests.dist.float64 import WithoutFloat32, settings

STEPS = 3
# a clip range that some values leave within three steps; see benchmarks/parity_table.py for Adam's
# epsilon
FLAGS = (
    "--advantage-estimator ppo --lr 1e-3 --critic-lr 3e-3 --adam-eps 1e-4 --clip-grad 0.5 "
    "--weight-decay 0.1 --value-clip 0.1 "
    "--critic-lr-warmup-iters 1 "
)
# name -> (tensor, pipeline, virtual, context, flags)
TWO_RANKS = {
    "TP2": (2, 1, 1, 1, "--tensor-model-parallel-size 2"),
    "TP2 SP": (2, 1, 1, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (1, 2, 1, 1, "--pipeline-model-parallel-size 2"),
    "PP2 VP2": (
        1,
        2,
        2,
        1,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "CP2": (1, 1, 1, 2, "--context-parallel-size 2"),
    "DP2": (1, 1, 1, 1, ""),
    "DP2 distributed optimizer": (1, 1, 1, 1, "--use-distributed-optimizer"),
    "DP2 token budget": (1, 1, 1, 1, "--use-dynamic-batch-size --max-tokens-per-gpu 40"),
    "DP2 overlap": (
        1,
        1,
        1,
        1,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}

FROZEN = "--critic-freeze-params-name-list self_attention "
FROZEN_LAYOUTS = ("TP2 SP", "PP2", "CP2", "DP2 distributed optimizer")


def critic_samples(seed: int) -> list[TrainSample]:
    """Random samples with values near 0 and returns of all sizes; one has no target, and one no
    active token."""
    g = torch.Generator().manual_seed(100 + seed)
    samples = []
    for i, sample in enumerate(random_samples(seed)):
        returns = torch.where(
            sample.loss_mask, torch.randn(sample.response_length, generator=g), 0.0
        )
        values = torch.where(
            sample.loss_mask, 0.1 * torch.randn(sample.response_length, generator=g), 0.0
        )
        if i == 3:
            returns = torch.where(sample.loss_mask, float("nan"), 0.0)
        mask = sample.loss_mask & (i != 5)
        samples.append(dataclasses.replace(sample, loss_mask=mask, values=values, returns=returns))
    return samples


def make_backend(folder: str, layout: ParallelLayout, flags: str) -> MegatronBackend:
    """With the critic of `folder`/critic, whose head is not zero: gradients reach the whole network
    from the first step on."""
    backend = MegatronBackend(settings(folder, FLAGS + flags), layout, total_steps=8)
    assert backend.critic is not None
    backend.critic.load_hf(f"{folder}/critic")
    return backend


def critic_weights(backend: MegatronBackend) -> dict[str, Tensor]:
    assert backend.critic is not None and backend.hf is not None
    backend.critic.finish_updates()
    stream = HfExport(
        backend.critic.chunks,
        hf=backend.hf,
        gpt=backend.gpt,
        layout=backend.critic.layout,
        value_head=True,
    ).stream()
    return {name: tensor.float().clone() for name, tensor in stream}


def train(folder: str, layout: ParallelLayout, flags: str, out: str) -> dict[str, Any]:
    """Values of this rank's samples, then STEPS optimizer steps; rank 0 writes the critic's weights
    before and after to `out`."""
    backend = make_backend(folder, layout, flags)
    before, policy = (
        critic_weights(backend),
        [p.detach().clone() for chunk in backend.policy.chunks for p in chunk.parameters()],
    )
    values = backend.forward_critic(share(critic_samples(0), layout).samples)
    results = [backend.update_critic(share(critic_samples(seed), layout)) for seed in range(STEPS)]
    after = critic_weights(backend)
    if layout.rank == 0:
        torch.save({"before": before, "after": after}, out)
    same = all(
        torch.equal(a, b)
        for a, b in zip(
            policy, (p for chunk in backend.policy.chunks for p in chunk.parameters()), strict=True
        )
    )
    return dict(
        values=[v.tolist() for v in values], dp_rank=layout.dp_rank, policy_is_untouched=same,
        losses=[r.metrics["value_loss"] for r in results],
        clipped=[r.metrics["value_clip_active"] for r in results],
        grad_norms=[r.grad_norm for r in results], lrs=[r.learning_rate for r in results],
    )  # fmt: skip


def skipped(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """A NaN in one gradient of the last rank: every rank skips, and the policy continues."""
    backend = make_backend(folder, layout, flags)
    assert backend.critic is not None
    gate = SkippedStepGuard(patience=3, owner="critic's ")
    handle = poison_one_rank(backend.critic, layout.world_size - 1, float("nan"))
    before = critic_weights(backend)
    result = backend.update_critic(share(critic_samples(1), layout))
    after = critic_weights(backend)
    if handle is not None:
        handle.remove()
    policy = backend.update(share(random_samples(1), layout))
    return dict(
        skipped=result.skipped,
        same=all(torch.equal(before[name], after[name]) for name in before),
        policy_skipped=policy.skipped,
        warning=gate.check(result.skipped, result.grad_norm),
    )  # fmt: skip


def two_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One launch for everything that needs two processes."""
    folder, out = arguments["model"], arguments["out"]
    result: dict[str, Any] = {}
    for name, (tp, pp, vp, cp, flags) in TWO_RANKS.items():
        with WithoutFloat32(), parallel(tp, pp, vp, cp=cp) as layout:
            result[name] = train(folder, layout, flags, f"{out}/{name}.pt")
            dist.barrier()
    for name in FROZEN_LAYOUTS:
        tp, pp, vp, cp, flags = TWO_RANKS[name]
        with WithoutFloat32(), parallel(tp, pp, vp, cp=cp) as layout:
            target = f"{out}/frozen {name}.pt"
            result[f"frozen {name}"] = train(folder, layout, FROZEN + flags, target)
            dist.barrier()
    for name in ("DP2 distributed optimizer", "TP2 SP", "PP2"):
        tp, pp, vp, _, flags = TWO_RANKS[name]
        with WithoutFloat32(), parallel(tp, pp, vp) as layout:
            result[f"poison {name}"] = skipped(folder, layout, flags)
    return result
