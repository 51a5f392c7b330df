"""Work of the parity matrix's processes: the reference runs, and the cells of one number of
processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.cells import LAYOUTS, LOSSES, PRECISIONS, Cell, Run, by_sizes
from benchmarks.parity.results import WORDS, Found, append
from benchmarks.parity.steps import differences, parallel, train
from slime_like.megatron.parallel_layout import ParallelLayout

OVERALL = {
    "gradients": "all_gradients",
    "weights": "all_weights",
}  # in bfloat16, in whose small tensors rounding is a matter of luck


def base_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """What everything is compared with: one process that takes one packed sample at a time.
    arguments["runs"], in addition to what the file arguments["base"] has already."""
    path = Path(arguments["base"])
    base: dict[Run, Any] = torch.load(path) if path.exists() else {}
    with parallel() as layout:
        for precision, model, loss in arguments["runs"]:
            flags = f"{LOSSES[loss]} --micro-batch-size 1 {PRECISIONS[precision].flags}"
            base[precision, model, loss] = train(
                arguments["models"][model], layout, flags, precision
            )
    half_written = path.with_suffix(".tmp")
    torch.save(base, half_written)
    half_written.replace(path)


def rounding(base: dict[Run, Any], precision: str, model: str) -> dict[str, float]:
    """How far one process in `precision` is from one in its base precision, in the worst loss."""
    seen = [
        differences(base[precision, model, loss], base[PRECISIONS[precision].base, model, loss])
        for loss in LOSSES
    ]
    return {word: max(each[OVERALL.get(word, word)] for each in seen) for word in WORDS}


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """The cells of one world size, in turn, those of the same groups together. Rank 0 prints each
    and adds its line to the file arguments["results"]. None is begun after arguments["seconds"]."""
    base = torch.load(arguments["base"])
    start = time.perf_counter()
    for sizes, cells in by_sizes([Cell(**cell) for cell in arguments["cells"]]):
        if out_of_time(start, arguments["seconds"]):
            return
        with parallel(**sizes) as layout:
            for cell in cells:
                if out_of_time(start, arguments["seconds"]):
                    break
                found = run_cell(cell, layout, arguments["models"], base)
                if rank == 0:
                    append(found, Path(arguments["results"]), arguments["code"])
                    print(f"  {cell.name:58} {found.worst:.1e}  {found.seconds:.1f} s", flush=True)


def out_of_time(start: float, seconds: float) -> bool:
    """Whether `seconds` have passed on any rank: all ranks end after the same cell."""
    late = torch.tensor(float(time.perf_counter() - start > seconds))
    torch.distributed.all_reduce(late, op=torch.distributed.ReduceOp.MAX)
    return bool(late)


def run_cell(
    cell: Cell, layout: ParallelLayout, models: dict[str, str], base: dict[Run, Any]
) -> Found:
    """Its differences from one process, the largest over the ranks."""
    model, precision = LAYOUTS[cell.layout].model, PRECISIONS[cell.precision]
    start = time.perf_counter()
    seen = differences(
        train(models[model], layout, cell.flags, cell.precision),
        base[precision.base, model, cell.loss],
    )
    if cell.precision != precision.base:
        off = rounding(base, cell.precision, model)
        seen |= {word: seen[OVERALL.get(word, word)] / off[word] for word in WORDS}
    apart = torch.tensor([seen[word] for word in WORDS], dtype=torch.float64)
    torch.distributed.all_reduce(apart, op=torch.distributed.ReduceOp.MAX)
    return Found(
        cell, dict(zip(WORDS, apart.tolist())), seen["worst_gradient"], time.perf_counter() - start
    )
