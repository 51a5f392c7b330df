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
}  # in bfloat16, where rounding errors of small tensors are random


def base_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Reference runs: one process, one packed sample per micro-batch. Runs arguments["runs"] that
    are not in the file arguments["base"] yet."""
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
    """Largest difference over losses of one process in `precision` from one in its base
    precision."""
    seen = [
        differences(base[precision, model, loss], base[PRECISIONS[precision].base, model, loss])
        for loss in LOSSES
    ]
    return {word: max(each[OVERALL.get(word, word)] for each in seen) for word in WORDS}


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Run the cells of one world size, grouped by process groups. Rank 0 prints each result and
    appends it to the file arguments["results"]. None is started after arguments["seconds"]."""
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
    """Whether `seconds` have passed on any rank, so that all ranks stop after the same cell."""
    late = torch.tensor(float(time.perf_counter() - start > seconds))
    torch.distributed.all_reduce(late, op=torch.distributed.ReduceOp.MAX)
    return bool(late)


def run_cell(
    cell: Cell, layout: ParallelLayout, models: dict[str, str], base: dict[Run, Any]
) -> Found:
    """Run a cell; returns its differences from one process, maximised over ranks."""
    model = LAYOUTS[cell.layout].model
    precision = PRECISIONS[cell.precision]
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
