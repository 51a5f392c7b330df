"""Work of the processes of test_settings.py: on the CPU one process that gives the numbers, on
pretend GPUs the same settings, and what happens to a network's state besides training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import (
    in_float64,
    largest,
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
from slime_like.megatron.offload import OffloadedNetwork, StoredState
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.run_state import load_state, save_state
from slime_like.types import TrainBatch
from tests.dist.float64 import WithoutFloat32

STEPS = 2
Cell = tuple[str, str, str]  # folder of the model, flags, precision


def base_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Write the numbers of arguments["cells"], by name, into the folder arguments["base"]."""
    for name, cell in arguments["cells"].items():
        with _layout_of(cell) as layout:
            torch.save(_numbers(_build(cell, layout)), Path(arguments["base"], f"{name}.pt"))


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """How far each cell is from its numbers on the CPU, and whether its state survives what
    `_states` does with it."""
    found = {}
    for name, cell in arguments["cells"].items():
        with _layout_of(cell) as layout:
            built = _build(cell, layout)
            apart = _apart(_numbers(built), torch.load(Path(arguments["base"], f"{name}.pt")))
            folder = Path(arguments["folder"], name.replace(" ", "_"))
            found[name] = {**apart, **_states(built, cell, folder)}
            del built
        print(rank, name, found[name], flush=True)
    dist.barrier()
    return found


@contextmanager
def _layout_of(cell: Cell) -> Iterator[ParallelLayout]:
    _, flags, precision = cell
    wide = WithoutFloat32() if precision == "float64" else nullcontext()
    with wide, parallel(**sizes_of(flags)) as layout:
        yield layout


def _build(cell: Cell, layout: ParallelLayout) -> MegatronBackend:
    folder, flags, precision = cell
    reference = "" if "lora" in flags else f"--use-kl-loss --kl-loss-coef 0.3 --ref-load {folder}"
    config = settings(folder, f"--lr 3e-4 --adam-eps 1e-6 {reference} {flags}")
    if precision == "float64":
        in_float64(config)
    return MegatronBackend(config, layout, total_steps=10)


def _numbers(built: MegatronBackend) -> dict[str, Any]:
    """Of all ranks' samples together, so of every layout the same."""
    layout = built.layout
    steps, log_probs = [], []
    for step in range(1, STEPS + 1):
        samples = share(train_samples(step), layout).samples
        scored = [s.log_probs for s in built.forward(samples)]
        log_probs += [p.double().sum().cpu() for p in scored]
        if built.reference is not None:
            scored = [s.log_probs for s in built.forward(samples, built.reference)]
            log_probs += [p.double().sum().cpu() for p in scored]
        steps.append(_step(built, step))
    found = {"steps": steps, "weights": weights(built), "log_probs": _mean(log_probs, layout)}
    if built.critic is not None:
        found["critic"] = [_critic_step(built) for _ in range(2)]
    return found


def _mean(values: list[Tensor], layout: ParallelLayout) -> float:
    """Of the values of all data-parallel ranks."""
    parts: list[Any] = [None] * layout.dp_size
    dist.all_gather_object(parts, float(torch.stack(values).mean()), group=layout.dp_group)
    return sum(parts) / len(parts)


def _step(built: MegatronBackend, seed: int) -> tuple[float, float]:
    result = built.update(share(train_samples(seed), built.layout))
    assert not result.skipped
    return result.metrics["loss" if "loss" in result.metrics else "value_loss"], result.grad_norm


def _critic_step(built: MegatronBackend) -> tuple[float, float]:
    assert built.critic is not None
    samples = share(train_samples(1), built.critic.layout).samples
    with_returns = [
        dataclasses.replace(
            sample, values=value, returns=torch.ones_like(value),
            loss_weights=torch.full_like(value, 1 / 40),
        )
        for sample, value in zip(samples, built.forward_critic(samples), strict=True)
    ]  # fmt: skip
    result = built.update_critic(TrainBatch(tuple(with_returns)))
    return result.metrics["loss" if "loss" in result.metrics else "value_loss"], result.grad_norm


def _apart(found: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Relative differences. Losses are divided by their largest, since terms nearly cancel."""
    assert found.keys() == base.keys() and found["weights"].keys() == base["weights"].keys()
    apart = {"weights": overall(found["weights"], base["weights"])}
    apart["log_probs"] = abs(found["log_probs"] / base["log_probs"] - 1)
    for name in found.keys() & {"steps", "critic"}:
        pairs = list(zip(found[name], base[name], strict=True))
        loss = largest(abs(a[0] - b[0]) for a, b in pairs) / max(abs(b[0]) for _, b in pairs)
        apart |= {
            f"{name} loss": loss,
            f"{name} norm": largest(abs(a[1] / b[1] - 1) for a, b in pairs),
        }
    return apart


def _states(built: MegatronBackend, cell: Cell, out: Path) -> dict[str, bool]:
    """After a step: the network moves to host memory and back, another model takes its place and
    gives it back, and it is saved and resumed, each to the last bit. Then both step, equally."""
    trained = built.trained
    before = _copies(built)
    OffloadedNetwork(trained).restore()
    found = {"offloads": _same(before, _copies(built))}
    stored = StoredState(trained)
    trained.reset_training_state()
    stored.restore(trained)
    found["is taken over"] = _same(before, _copies(built))
    saver = CheckpointSaver(out, SavePolicy())
    save_state(built, saver, 1, {"data": None}, with_optimizer=True, with_rng=True)
    again = _build(cell, built.layout)
    again.trained.allocate_moments()  # as a checkpoint before the first step does
    found["starts finite"] = not again.trained.has_non_finite()
    folder = checkpoint_folder(out, 1)
    load_state(again, folder, with_optimizer=True, with_rng=True, verify=True)
    found["resumes"] = _step(built, STEPS + 1) == _step(again, STEPS + 1)
    return found


def _copies(built: MegatronBackend) -> list[Tensor]:
    return [t.detach().to("cpu", copy=True) for t in built.trained.tensors()]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
