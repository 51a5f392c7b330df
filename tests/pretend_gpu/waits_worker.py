"""Work of the processes that count waits: a second optimizer step, after what is done once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings, share, train_samples
from slime_like.megatron.backend import MegatronBackend
from slime_like.types import TrainBatch
from tests.pretend_gpu.waits import WAITS, Wait
from tests.pretend_gpu.waits_budget import FORWARD, STEP, TRAINING


def count(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """By cell: [phase, kind, operator, where, caller, count] of this rank, of passes over the
    samples of `train_samples` and one step."""
    found = {}
    for name, (folder, flags) in arguments["cells"].items():
        with parallel(**sizes_of(flags)) as layout:
            config = settings(folder, f"--bf16 --use-distributed-optimizer {flags}")
            built = MegatronBackend(config, layout, total_steps=4)
            samples = share(train_samples(1), layout)
            built.forward(samples.samples)
            built.update(samples)
            samples = share(train_samples(2), layout)
            WAITS.start()
            with WAITS.phase(FORWARD):
                scored = built.forward(samples.samples)
            if scored[0].routed_experts is not None:  # to be replayed
                pairs = zip(samples.samples, scored, strict=True)
                samples = TrainBatch(
                    tuple(replace(s, routed_experts=o.routed_experts) for s, o in pairs)
                )
            with WAITS.phase(TRAINING):
                pending = built.forward_backward(samples)
            with WAITS.phase(STEP):
                built.optim_step(pending)
            found[name] = _rows(WAITS.stop())
            del built, pending
    dist.barrier()
    return found


def _rows(counts: dict[Wait, int]) -> list[list[Any]]:
    """Without line numbers, which every edit above moves."""
    merged: Counter[tuple[str, ...]] = Counter()
    for wait, number in counts.items():
        place = (_place(wait.ours), _place(wait.caller))
        merged[wait.phase, wait.kind, wait.op, *place] += number
    return [[*wait, number] for wait, number in sorted(merged.items())]


def _place(where: str) -> str:
    """`file.py:12 function` as `file.py function`."""
    file, _, rest = where.partition(":")
    return f"{file} {rest.partition(' ')[2]}".strip()
