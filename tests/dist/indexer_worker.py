"""Workers of tests/dist/test_indexer_replay.py: models with sparse attention whose trainer attends
to given keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arguments.hf.indexers import indexer_layers, selection_width, tokens_of_entry
from benchmarks.parity import steps
from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import gradients, parallel, random_samples, share, weights
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.samples.indexer_topk import unknown_keys
from slime_like.types import TrainBatch, TrainSample
from tests.dist.float64 import WithoutFloat32, settings

FLAG = "--use-rollout-indexer-replay"
SAMPLING = SamplingParams(max_new_tokens=12, report_indexer_topk=True, ignore_end_tokens=True)


def random_keys(samples: list[TrainSample], backend: MegatronBackend) -> list[TrainSample]:
    """With random keys of all queries that have a choice, but the last: an engine's. Every third
    row is filled up with -1."""
    g = torch.Generator().manual_seed(int(samples[0].tokens.sum()))
    config = backend.transformer
    width, indexers = selection_width(config), sum(indexer_layers(config))
    tokens = tokens_of_entry(config)
    found = []
    for sample in samples:
        keys = unknown_keys(sample.tokens.numel(), indexers, width)
        for row in range(len(keys) - 1):
            seen = (width + row + 1) // tokens  # all of them where there is no choice
            for slot in range(indexers):
                count = min(seen, width - 1 if row % 3 == 2 and seen > width else width)
                keys[row, slot, :count] = torch.randperm(seen, generator=g)[:count].int()
        found.append(dataclasses.replace(sample, indexer_topk=keys))
    return found


def three_steps(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """Losses, gradients and shares of other keys of three steps, and the weights after them."""
    size = "" if "--use-dynamic-batch-size" in flags else "--micro-batch-size 2"
    config = settings(folder, f"{FLAG} {size} --clip-grad 0 --adam-eps 1e-6 --lr 3e-4 {flags}")
    backend = MegatronBackend(config, layout, total_steps=8)
    losses, shares, grads = [], [], {}
    for number in (1, 2, 3):
        samples = random_keys(random_samples(number), backend)
        batch = TrainBatch(tuple(backend.with_choices_of_stage(share(samples, layout).samples)))
        pending = backend.forward_backward(batch)
        grads |= {f"step {number} {name}": g for name, g in gradients(backend).items()}
        metrics = backend.optim_step(pending).metrics
        losses.append(metrics["loss"])
        shares.append(metrics["indexer_replay_disagreement"])
    return {
        "losses": losses,
        "shares": shares,
        "gradients": grads,
        "weights": weights(backend),
    }


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """For every cell, by name, what `three_steps` returns. Rank 0 writes it to `out`."""
    results: dict[str, Any] = {}
    for name, (folder, flags) in arguments["cells"].items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            results[name] = three_steps(folder, layout, flags)
    if rank == 0:
        torch.save(results, arguments["out"])


def other_indexers(backend: MegatronBackend) -> Iterator[tuple[str, Tensor]]:
    """The trainer's weights, with others in its indexers."""
    g = torch.Generator().manual_seed(5)
    for name, tensor in backend.export_weights():
        is_matrix = ".indexer." in name and tensor.dim() == 2
        noise = torch.randn(tensor.shape, generator=g) * tensor.std() if is_matrix else 0
        yield name, tensor + noise


def train_sample(request: GenerateRequest, output: GenerateOutput) -> TrainSample:
    length = len(output.tokens)
    return TrainSample(
        tokens=torch.tensor([*request.prompt_tokens, *output.tokens]),
        response_length=length,
        loss_mask=torch.ones(length, dtype=torch.bool),
        loss_weights=torch.full((length,), 1 / 32),
        advantages=torch.ones(length),
        old_log_probs=torch.tensor(output.log_probs),
        indexer_topk=output.indexer_topk,
    )


def requests_of(lengths: Sequence[int]) -> list[GenerateRequest]:
    return [
        GenerateRequest(i, tuple(5 + (7 * i + 3 * j) % 40 for j in range(n)), seed=70 + i)
        for i, n in enumerate(lengths)
    ]


def with_engine(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How far the trainer's log-probs are from those of an engine whose indexers are others, with
    replay and without; and the trainer's own share of other keys."""
    found = {}
    for name, folder in arguments["models"].items():
        with parallel() as layout:
            config = steps.settings(folder, f"{FLAG} --micro-batch-size 2")
            backend = MegatronBackend(config, layout, total_steps=8)
            engine = LocalEngine(folder, None)
            engine.update_weights(other_indexers(backend), 1)
            requests = requests_of((3, 19, 11, 19, 2, 26, 30, 7))
            outputs = engine.generate(requests, SAMPLING)
            samples = [train_sample(r, o) for r, o in zip(requests, outputs, strict=True)]
            replayed = backend.with_choices_of_stage(samples)
            right = apart_from(outputs, backend.forward(replayed))
            share_of_keys = backend.indexer_disagreement()
            plain = [dataclasses.replace(s, indexer_topk=None) for s in samples]
            wrong = apart_from(outputs, backend.forward(plain))
            found[name] = {
                "with": right,
                "without": wrong,
                "share": share_of_keys,
                "rows": sum(o.indexer_topk.size(0) for o in outputs),
            }
    return found


def apart_from(outputs: Sequence[GenerateOutput], scored: Sequence[Any]) -> float:
    return max(
        float((torch.tensor(o.log_probs) - s.log_probs).abs().max())
        for o, s in zip(outputs, scored, strict=True)
    )
