"""Work of the processes of test_fp16.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import (
    gradients,
    overall,
    parallel,
    settings,
    share,
    train_samples,
    weights,
)
from slime_like.checkpoints.folders import checkpoint_folder
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.checkpoint import CheckpointSaver, SavePolicy
from slime_like.megatron.offload import StoredState
from slime_like.megatron.optimizer import main_parameters, moments
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.run_state import load_state, save_state
from slime_like.types import StepResult, TrainBatch

FP16 = "--allow-untested fp16:true"
SCALES = ("initial_loss_scale:1024", "loss_scale:16384")  # a dynamic and a constant one
TERMS = "--use-kl-loss --kl-loss-coef 0.3 --entropy-coef 0.02 --micro-batch-size 2 --adam-eps 1e-6"


def compare_gradients(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Relative differences of fp16's unscaled gradients, and of their norm, from those of float32,
    by loss scale."""
    found = {}
    for name, (model, flags) in arguments["cells"].items():
        with parallel(**sizes_of(flags)) as layout:
            wide = _build(model, layout, flags)
            expected, norm = _gradients(wide)
            found[name] = {}
            for scale in SCALES:
                narrow = _build(model, layout, f"{flags} {FP16} {scale}")
                got, got_norm = _gradients(narrow)
                by = float(scale.partition(":")[2])
                unscaled = {key: value / by for key, value in got.items()}
                found[name][scale] = [overall(unscaled, expected), abs(got_norm / norm - 1)]
    return found


def overflow(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step that overflows on one rank between two good ones, against the good ones alone."""
    found = {}
    for name, (model, flags) in arguments["cells"].items():
        words = f"{flags} {FP16} initial_loss_scale:1024 hysteresis:1"
        with parallel(**sizes_of(flags)) as layout:
            plain = _build(model, layout, words)
            good = [_step(plain, seed) for seed in (1, 2)]
            built = _build(model, layout, words)
            results = [_step(built, 1)]
            before = _copies(built)
            results.append(_overflowing_step(built))
            after = _copies(built)
            again = _resumed(built, model, words, Path(arguments["out"], name.replace(" ", "_")))
            taken_over = StoredState(built.trained)
            built.trained.reset_training_state()
            reset = built.trained.loss_scale
            taken_over.restore(built.trained)
            results.append(_step(built, 2))
            continued = _step(again, 2)
            found[name] = {
                "skipped": [result.skipped for result in results],
                "scales": [result.loss_scale for result in [*good, *results, continued]],
                "reset": reset,
                "norms": [results[2].grad_norm / good[1].grad_norm, continued.grad_norm],
                "resumed": continued.grad_norm == results[2].grad_norm,
                "kept": all(map(torch.equal, before, after)),
                "apart": overall(weights(built), weights(plain)),
            }
    return found


def _build(model: str, layout: ParallelLayout, flags: str) -> MegatronBackend:
    terms = TERMS if "lora" in flags else f"{TERMS} --ref-load {model}"
    if "lora" in flags:
        terms = terms.replace("--use-kl-loss --kl-loss-coef 0.3", "")
    return MegatronBackend(settings(model, f"--lr 3e-4 {terms} {flags}"), layout, total_steps=10)


def _batch(built: MegatronBackend, seed: int, factor: float = 1.0) -> TrainBatch:
    """This rank's samples, their weights multiplied by a factor."""
    samples = share(train_samples(seed), built.layout).samples
    return TrainBatch(
        tuple(dataclasses.replace(s, loss_weights=s.loss_weights * factor) for s in samples)
    )


def _gradients(built: MegatronBackend) -> tuple[dict[str, Tensor], float]:
    """Of one pass, scaled, by name; and the norm of the step, which is unscaled."""
    pending = built.forward_backward(_batch(built, 1))
    if built.trained.saved_chunks is built.trained.chunks:
        found = gradients(built)
    else:  # of an adapter
        built.trained.reduce_gradients()
        (adapter,) = built.trained.saved_chunks
        found = {n: p.main_grad.float().clone() for n, p in adapter.named_parameters()}
    return found, built.optim_step(pending).grad_norm


def _step(built: MegatronBackend, seed: int) -> StepResult:
    return built.update(_batch(built, seed))


def _overflowing_step(built: MegatronBackend) -> StepResult:
    """Too large a loss on the last data-parallel rank, or, in a model with experts, a gradient of
    these alone: their part of the optimizer is another."""
    last = built.layout.dp_rank == built.layout.dp_size - 1
    experts = [p for c in built.policy.chunks for n, p in c.named_parameters() if ".experts." in n]
    pending = built.forward_backward(_batch(built, 3, 1e6 if last and not experts else 1.0))
    if last and experts:
        experts[0].main_grad.view(-1)[0] = float("inf")  # type: ignore[attr-defined]
    return built.optim_step(pending)


def _copies(built: MegatronBackend) -> list[Tensor]:
    """Weights, main parameters, moments and step counts: all that an overflow must keep."""
    trained = built.trained
    parameters = [p.data for chunk in trained.saved_chunks for p in chunk.parameters()]
    kept = [*parameters, *main_parameters(trained.optimizer), *moments(trained.optimizer)]
    return [tensor.clone() for tensor in kept]


def _resumed(built: MegatronBackend, model: str, words: str, out: Path) -> MegatronBackend:
    saver = CheckpointSaver(out, SavePolicy())
    save_state(built, saver, 1, {"data": None}, with_optimizer=True, with_rng=True)
    again = _build(model, built.layout, words)
    load_state(again, checkpoint_folder(out, 1), with_optimizer=True, with_rng=True, verify=True)
    return again
