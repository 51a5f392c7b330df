"""Workers of tests/dist/test_moe.py: a `MegatronBackend` with an MoE model, in one layout after
another."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from arguments.hf.moe import moe_layers
from arguments.parse import parse_args
from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import gradients, parallel, random_samples, share, weights
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.moe import decoder_routers
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import TrainBatch, TrainSample
from tests.dist.backend_worker import poison_one_rank
from tests.dist.float64 import WithoutFloat32, settings

ADAM = "--adam-eps 1e-6 --lr 3e-4"


def three_steps(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """Losses, gradients, gradient norms and router metrics of three steps, and the weights after
    them. With --use-routing-replay the routed experts of all three steps are those of the first weights,
    and the steps are large."""
    replay = "--use-routing-replay" in flags
    backend = MegatronBackend(
        settings(folder, f"{flags} {ADAM}{' --lr 2e-3' if replay else ''}"), layout, total_steps=8
    )
    batches = [share(random_samples(seed), layout) for seed in (1, 2, 3)]
    if replay:
        batches = [with_routed_experts(backend, batch) for batch in batches]
    if "--use-rollout-routing-replay" in flags:
        samples = [random_routes(random_samples(seed), backend) for seed in (1, 2, 3)]
        batches = [
            TrainBatch(tuple(backend.with_choices_of_stage(share(s, layout).samples)))
            for s in samples
        ]
    steps, grads = [], {}
    for number, batch in enumerate(batches, start=1):
        pending = backend.forward_backward(batch)
        grads |= {
            f"step {number} {name}": gradient for name, gradient in gradients(backend).items()
        }
        steps.append(backend.optim_step(pending))
    return dict(
        losses=[s.metrics["loss"] for s in steps],
        gradients=grads,
        grad_norms=[s.grad_norm for s in steps],
        moe=[
            {name: value for name, value in s.metrics.items() if name.startswith("moe_")}
            for s in steps
        ],
        weights=weights(backend),
    )


def random_routes(samples: list[TrainSample], backend: MegatronBackend) -> list[TrainSample]:
    """With random experts for all tokens but the last, in all expert layers of the model: a
    sampler's."""
    g = torch.Generator().manual_seed(int(samples[0].tokens.sum()))
    config = backend.transformer
    layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
    found = []
    for sample in samples:
        order = torch.rand(
            sample.tokens.numel(), layers, config.num_moe_experts, generator=g
        ).argsort(dim=-1)
        routed_experts = order[..., : config.moe_router_topk].to(torch.int16)
        routed_experts[-1] = -1
        found.append(dataclasses.replace(sample, routed_experts=routed_experts))
    return found


def with_routed_experts(backend: MegatronBackend, batch: TrainBatch) -> TrainBatch:
    reported = backend.forward(batch.samples)
    return TrainBatch(
        tuple(
            dataclasses.replace(s, routed_experts=t.routed_experts)
            for s, t in zip(batch.samples, reported, strict=True)
        )
    )


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """For every case, by name, what `three_steps` returns. Rank 0 writes it to `out`."""
    results: dict[str, Any] = {}
    for name, (folder, flags) in arguments["cases"].items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            results[name] = three_steps(folder, layout, flags)
    if rank == 0:
        torch.save(results, arguments["out"])


SIGMOID = """--debug-train-only --load-debug-rollout-data {rollout_id} --lr 1e-2 --num-rollout 4 --rollout-batch-size 2
    --n-samples-per-prompt 4 --no-tensorboard --no-progress --vocab-size 61 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48
    --num-attention-heads 4 --position-embedding-type rope --max-position-embeddings 128 --swiglu --normalization RMSNorm --disable-bias-linear
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.01"""


def expert_bias(layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """Loads of all ranks in a step and the biases after it, then after a step that is skipped;
    whether checkpoints have them."""
    backend = MegatronBackend(
        parse_args(f"{SIGMOID} {flags}".split(), layout.world_size), layout, total_steps=8
    )
    routers = decoder_routers(backend.policy.chunks)

    def biases() -> list[list[float]]:
        return [router.expert_bias.tolist() for router in routers]

    batch = share(random_samples(1), layout)
    backend.forward(batch.samples)  # counts nothing
    first = backend.update(batch)
    loads = torch.stack([router.load for router in routers])
    dist.all_reduce(loads)
    after = biases()
    handle = poison_one_rank(backend.policy, layout.world_size - 1, float("nan"))
    skipped = backend.update(share(random_samples(2), layout)).skipped
    kept = biases() == after
    if handle is not None:
        handle.remove()
    backend.update(share(random_samples(2), layout))
    saved = sum(
        "expert_bias" in key
        for chunk in backend.policy.chunks
        for key in chunk.sharded_state_dict()
    )
    return dict(
        first_skipped=first.skipped,
        loads=loads.tolist(),
        biases=after,
        skipped=skipped,
        kept=kept,
        moved=biases() != after,
        saved=saved,
    )


def balancing(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One launch for the auxiliary losses and the expert bias."""
    auxiliary_gradients(rank, arguments)
    with parallel(ep=2) as layout:
        return expert_bias(layout, "--expert-model-parallel-size 2")


def auxiliary_gradients(rank: int, arguments: dict[str, Any]) -> None:
    """For every case, by name: gradients and metrics of a step in which only the auxiliary losses
    count. Rank 0 writes them to `out`."""
    results: dict[str, Any] = {}
    for name, flags in arguments["cases"].items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            backend = MegatronBackend(settings(arguments["model"], flags), layout, total_steps=8)
            silent = [
                dataclasses.replace(s, loss_weights=0 * s.loss_weights) for s in random_samples(1)
            ]
            torch.set_default_dtype(torch.float64)  # of the scale of auxiliary losses
            pending = backend.forward_backward(share(silent, layout))
            torch.set_default_dtype(torch.float32)
            results[name] = gradients(backend), dict(pending.metrics)
    if rank == 0:
        torch.save(results, arguments["out"])
