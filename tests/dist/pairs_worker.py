"""Workers of tests/dist/test_pairs.py: an optimizer step on answer pairs, from the file to the
gradients, in one layout after another, for a policy and a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.parse import parse_args
from benchmarks.parity.steps import parallel
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.samples.groups import flatten
from slime_like.trainer.trainer import Trainer
from tests.dist.algorithms_worker import gradients
from tests.dist.float64 import WithoutFloat32, precise

# name: sizes of model parallelism, and flags; of one process
ONE: dict[str, tuple[dict[str, int], str]] = {
    "one": ({}, "--micro-batch-size 8"),
    "a pair at a time": ({}, "--micro-batch-size 2"),
    "budget": ({}, "--use-dynamic-batch-size --max-tokens-per-gpu 60"),
    "padded": ({}, "--micro-batch-size 4 --qkv-format bshd"),
}
TWO: dict[str, tuple[dict[str, int], str]] = {
    "DP2": ({}, "--micro-batch-size 2"),
    "DP2 budget": ({}, "--use-dynamic-batch-size --max-tokens-per-gpu 60"),
    "TP2 SP": ({"tp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": ({"pp": 2}, "--pipeline-model-parallel-size 2"),
    "CP2": ({"cp": 2}, "--context-parallel-size 2 --micro-batch-size 4"),
    "CP2 budget": (
        {"cp": 2},
        "--context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 40",
    ),
}


def step(
    arguments: dict[str, Any], flags: str, layout: ParallelLayout
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of the first step with these flags."""
    words = f"{flags} --output-dir {arguments['out']}"
    config = precise(parse_args(words.split(), layout.world_size))
    trainer = Trainer(config, layout, Path(arguments["out"]))
    if trainer.backend.policy.value_head:
        give_head(trainer.backend.trained)
    try:
        samples = flatten(trainer.sampling.rollout_manager.generate(0).groups)
        (batch,) = trainer.batch_builder.build_supervised(samples)[0].policy
        pending = trainer.backend.forward_backward(batch)
        return dict(pending.metrics), gradients(trainer.backend)
    finally:
        trainer.close()


@torch.no_grad()
def give_head(network: TrainedNetwork) -> None:
    """Weights other than 0, with which no gradient reaches the transformer."""
    g = torch.Generator().manual_seed(5)
    for name, parameter in (pair for chunk in network.chunks for pair in chunk.named_parameters()):
        if name == "output_layer.weight":
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    network.weights_changed()


def one_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Metrics of each way of cutting the step; the gradients of the first are kept."""
    result: dict[str, Any] = {}
    kept = {}
    with WithoutFloat32(), parallel() as layout:
        for kind, words in arguments["flags"].items():
            expected: dict[str, Tensor] = {}
            for name, (_, flags) in ONE.items():
                metrics, found = step(arguments, f"{words} {flags}", layout)
                expected = expected or found
                far = apart(found, expected)
                result[f"{kind} | {name}"] = {"metrics": metrics, "apart": far}
            norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
            result[f"{kind} | norm"] = norm
            kept[kind] = expected
    torch.save(kept, Path(arguments["out"]) / "gradients.pt")
    return result


def two_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Metrics of each of arguments["cases"], and how far its gradients are from those of one
    process."""
    expected = torch.load(Path(arguments["out"]) / "gradients.pt", weights_only=True)
    result = {}
    for case in arguments["cases"]:
        kind, name = case.split(" | ")
        sizes, flags = TWO[name]
        with WithoutFloat32(), parallel(**sizes) as layout:
            metrics, found = step(arguments, f"{arguments['flags'][kind]} {flags}", layout)
        result[case] = {"metrics": metrics, "apart": apart(found, expected[kind])}
    return result


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the worst tensor, over its norm."""
    assert found.keys() == expected.keys()
    return max(
        float((g - found[name]).norm() / g.norm())
        for name, g in expected.items()
        if name != "score.bias"  # not trained
    )
