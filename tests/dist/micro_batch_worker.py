"""Workers of tests/dist/test_parity_micro_batches.py: a `Trainer` on recorded rollouts of very
uneven lengths, split into micro-batches in several ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from arguments.parse import parse_args
from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import dist, parallel
from benchmarks.parity_table import make_model
from slime_like.metrics.timers import STEP_SECONDS
from slime_like.rollout.recording import save_rollout
from slime_like.samples.groups import SampleGroup
from slime_like.trainer.trainer import Trainer
from slime_like.types import NOT_SAMPLED, Sample
from tests.dist.float64 import WithoutFloat32, precise

STEPS, GROUPS, GROUP_SIZE = 2, 3, 3
FLAGS = (
    "--debug-train-only --lr 3e-4 --adam-eps 1e-6 --weight-decay 0.1 --rollout-batch-size 3 --n-samples-per-prompt 3 --num-rollout 2 "
    "--use-kl-loss --kl-loss-coef 0.3 --entropy-coef 0.05 --policy-loss-type sapo --no-tensorboard --no-progress"
)
# an odd number of samples, one as long as all others together: ranks and micro-batches hold
# different numbers of them
RESPONSES = (60, 2, 5, 9, 3, 14, 1, 7, 4)


def make_files(folder: Path) -> dict[str, str]:
    make_model(folder / "model", seed=3)
    make_model(folder / "ref", seed=4)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        groups = []
        for g in range(GROUPS):
            prompt = torch.randint(61, (2 + g,), generator=generator)
            samples = tuple(make_sample(step, g, j, prompt, generator) for j in range(GROUP_SIZE))
            groups.append(SampleGroup(step * GROUPS + g, samples))
        save_rollout(str(folder / "rollout_{rollout_id}"), step, groups)
    return {"folder": str(folder)}


def make_sample(
    step: int, g: int, j: int, prompt: torch.Tensor, generator: torch.Generator
) -> Sample:
    length = RESPONSES[(g * GROUP_SIZE + j + step) % len(RESPONSES)]
    mask = torch.rand(length, generator=generator) > 0.2
    return Sample(
        group_id=step * GROUPS + g,
        sample_id=(step * GROUPS + g) * GROUP_SIZE + j,
        tokens=torch.cat([prompt, torch.randint(61, (length,), generator=generator)]),
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=-4.1 + 0.3 * torch.randn(length, generator=generator),
        reward=float(torch.rand((), generator=generator)),
        weight_versions=tuple(1 if m else NOT_SAMPLED for m in mask.tolist()),
    )


def train(folder: str, layout: Any, flags: str, out: Path) -> dict[str, Any]:
    """Both rollouts; metrics of each, and the weights in a file (of rank 0)."""
    words = f"{FLAGS} --hf-checkpoint {folder}/model --ref-load {folder}/ref --load-debug-rollout-data {folder}/rollout_{{rollout_id}} {flags}"
    config = precise(parse_args(words.split(), dist.get_world_size()))
    trainer = Trainer(config, layout, out)
    rows = []
    for step in range(STEPS):
        rows.append(trainer.step(step) | trainer.progress.take_seconds())
    weights = {name: tensor.clone() for name, tensor in trainer.backend.export_weights()}
    if layout.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights, out / "weights.safetensors")
    trainer.close()
    return {
        "rows": rows,
        "weights": str(out / "weights.safetensors"),
        "seconds": rows[-1][STEP_SECONDS],
    }


@contextmanager
def groups_of(flags: str) -> Iterator[Any]:
    """megatron-core's groups for the sizes in `flags`, in a world that is there already; float64."""
    with parallel(**sizes_of(flags)) as layout, WithoutFloat32():
        yield layout


def on_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """cases: flags by name."""
    results = {}
    for name, flags in arguments["cases"].items():
        with groups_of(flags) as layout:
            results[name] = train(
                arguments["folder"], layout, flags, Path(arguments["out"]) / name.replace(" ", "_")
            )
    return results
