"""Workers of tests/dist/test_algorithms.py: the second optimizer step of a rollout, with ratios
other than 1, through the parts of `Trainer`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.steps import parallel
from slime_like.losses import LossTerms, policy_losses
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.objectives import Objective
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.samples.groups import flatten
from slime_like.samples.masking import mask_failed
from slime_like.trainer.trainer import Trainer
from tests.dist.float64 import WithoutFloat32, settings

LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "DP2": ({}, ""),
    "TP2": ({"tp": 2}, "--tensor-model-parallel-size 2"),
    "PP2": ({"pp": 2}, "--pipeline-model-parallel-size 2"),
    "CP2": ({"cp": 2}, "--context-parallel-size 2"),
}
# Plain gradient descent, so that rounding in the first step's gradient is not blown up. Far enough
# that ratios leave the usual ranges.
SUPERVISED = "supervised"
COMMON = (
    "--optimizer sgd --sgd-momentum 0 --lr 1.0 --clip-grad 0 --weight-decay 0 "
    "--num-steps-per-rollout 2 --micro-batch-size 2"
)


def gradients(backend: MegatronBackend) -> dict[str, Tensor]:
    """Of every trained parameter, whole, by Hugging Face name: they are exported in the parameters'
    place, next to the values of others."""
    backend.trained.reduce_gradients()
    every = (p for chunk in backend.policy.chunks for p in chunk.parameters())
    parameters = [p for p in every if p.requires_grad]
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.main_grad)
        named = {name: tensor.clone() for name, tensor in backend.export_weights()}
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)
    return named


def second_step(
    folder: str, layout: ParallelLayout, out: str, flags: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics, and gradients by name. flags: SUPERVISED trains cross_entropy on the recorded
    responses."""
    config = settings(folder, f"{COMMON} {flags.replace(SUPERVISED, '')}")
    with closing(Trainer(config, layout, Path(out))) as trainer:
        if SUPERVISED in flags:
            loss = policy_losses.get("cross_entropy")
            trainer.backend.objective = Objective(loss, loss.config_type(), LossTerms())
        samples = [
            mask_failed(sample)
            for sample in flatten(trainer.sampling.rollout_manager.generate(0).groups)
        ]
        first, second = trainer.batch_builder.build(samples, weight_version=0)[0].policy
        trainer.backend.update(first)
        pending = trainer.backend.forward_backward(second)
        return dict(pending.metrics), gradients(trainer.backend)


def one_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Every case on one process; the gradients go to a file for `two_ranks`."""
    metrics, named = {}, {}
    with WithoutFloat32(), parallel() as layout:
        for name, flags in arguments["cases"].items():
            metrics[name], named[name] = second_step(
                arguments["model"], layout, arguments["out"], flags
            )
    torch.save(named, Path(arguments["out"]) / "gradients.pt")
    return {
        name: dict(m, gradient=float(torch.stack([g.norm() for g in named[name].values()]).norm()))
        for name, m in metrics.items()
    }


def two_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The chosen cases in each layout: metrics, and how far the gradient is from that of one
    process, by its worst tensor."""
    expected = torch.load(Path(arguments["out"]) / "gradients.pt", weights_only=True)
    result: dict[str, Any] = {}
    for layout_name, (sizes, more) in LAYOUTS.items():
        with WithoutFloat32(), parallel(**sizes) as layout:
            for name in arguments["layouts"][layout_name]:
                flags = arguments["cases"][name]
                metrics, found = second_step(
                    arguments["model"], layout, arguments["out"], f"{flags} {more}"
                )
                assert found.keys() == expected[name].keys()
                apart = {
                    key: float((g - found[key]).norm() / g.norm())
                    for key, g in expected[name].items()
                }
                worst = max(apart, key=lambda key: apart[key])
                result[f"{name} | {layout_name}"] = dict(
                    metrics=metrics, apart=apart[worst], worst=worst
                )
    return result
