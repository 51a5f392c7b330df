"""Promise 2, in full: every loss in every layout gives the numbers of one process. One command, one table.

    python scripts/parity/matrix.py                                        # everything: `make parity-full`
    python scripts/parity/matrix.py --layouts CP2 "TP2 PP2" --losses gspo  # some
    python scripts/parity/matrix.py --json matrix.json                     # every figure of every cell
    python scripts/parity/matrix.py --from-json a.json b.json --docs       # of earlier runs, into the pages on parity

A cell is one loss in one layout, with rows that are packed, padded (--qkv-format bshd) or cut by token budgets, with or without full
recompute: three optimizer steps (Adam, weight decay, clipping, KL and entropy terms) on samples of uneven lengths with holes in their masks,
other samples on every data-parallel rank. Compared with one process that takes one packed sample at a time: the loss and all
gradients of each step, log-probs before the first and parameters after the third. A gradient or parameter counts by tensor: norm of the
difference over norm. The figure of a cell is its largest.

float32: limit 1e-5. float64: against one process in float64, limit 1e-12; here nothing but an error can differ, however badly a network is
conditioned. bfloat16: against one process in float32, all gradients and all parameters taken as one, in multiples of what one process in
bfloat16 is off from it (in the worst loss); limit 2.

The layouts of the experts run a Qwen3-MoE with auxiliary coefficients 0 (no token is ever dropped), the others a Qwen3 model. One set of
processes serves all cells of one world size.

Exit status 1 when a cell is over its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.parity.cells import LAYOUTS, LOSSES, MODELS, PRECISIONS, RECOMPUTE, ROWS, Cell, matrix  # noqa: E402
from scripts.parity.ranks import run_ranks  # noqa: E402
from scripts.parity.report import WORDS, Found, load, over_limit, save, summary, table, write_docs  # noqa: E402
from scripts.parity.steps import differences, parallel, sizes_of, train  # noqa: E402
from slime_like.megatron_backend.layout import ParallelLayout  # noqa: E402

OVERALL = {"gradients": "all_gradients", "weights": "all_weights"}  # in bfloat16, in whose small tensors rounding is a matter of luck


# --- on the ranks ------------------------------------------------------------------------------------------------------


def base_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """What everything is compared with, into arguments["base"]: by precision, model and loss, one process that takes one packed sample at
    a time. And under "rounding", by model, how far that of bfloat16 is from that of float32."""
    base: dict[str, Any] = {}
    with parallel() as layout:
        for precision in arguments["precisions"]:
            common = f"--micro-batch-size 1 {PRECISIONS[precision].flags}"
            base[precision] = {
                model: {loss: train(folder, layout, f"{LOSSES[loss]} {common}", precision) for loss in arguments["losses"]}
                for model, folder in arguments["models"].items()
            }
    if "bfloat16" in base:
        base["rounding"] = {
            model: largest_differences([differences(run, base["float32"][model][loss]) for loss, run in runs.items()])
            for model, runs in base["bfloat16"].items()
        }
    torch.save(base, arguments["base"])


def largest_differences(seen: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {word: max(each[OVERALL.get(word, word)] for each in seen) for word in WORDS}


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of one world size, in turn: what `Found` holds, largest over the ranks. Rank 0 prints each."""
    base = torch.load(arguments["base"])
    cells = [Cell(**cell) for cell in arguments["cells"]]
    results: dict[Cell, dict[str, Any]] = {}
    by_sizes: dict[tuple[tuple[str, int], ...], list[Cell]] = {}
    for cell in cells:
        by_sizes.setdefault(tuple(sizes_of(cell.flags).items()), []).append(cell)
    for sizes, chosen in by_sizes.items():
        with parallel(**dict(sizes)) as layout:
            for cell in chosen:
                found = results[cell] = run_cell(cell, layout, arguments["models"], base)
                if rank == 0:
                    print(f"  {cell.name:58} {max(found['apart'].values()):.1e}  {found['seconds']:.1f} s", flush=True)
    return [results[cell] for cell in cells]


def run_cell(cell: Cell, layout: ParallelLayout, models: dict[str, str], base: dict[str, Any]) -> dict[str, Any]:
    model = LAYOUTS[cell.layout].model
    start = time.perf_counter()
    seen = differences(train(models[model], layout, cell.flags, cell.precision), base[PRECISIONS[cell.precision].base][model][cell.loss])
    if cell.precision == "bfloat16":
        seen |= {word: seen[OVERALL.get(word, word)] / base["rounding"][model][word] for word in WORDS}
    apart = torch.tensor([seen[word] for word in WORDS], dtype=torch.float64)
    torch.distributed.all_reduce(apart, op=torch.distributed.ReduceOp.MAX)
    return dict(
        cell=asdict(cell), apart=dict(zip(WORDS, apart.tolist())), tensor=seen["worst_gradient"], seconds=time.perf_counter() - start
    )  # fmt: skip


# --- the command -------------------------------------------------------------------------------------------------------


def run_matrix(cells: Sequence[Cell], folder: Path, *, show: bool = False) -> list[Found]:
    """Run them, one launch for each number of processes."""
    models = {}
    for name, make in MODELS.items():
        if any(LAYOUTS[cell.layout].model == name for cell in cells):
            make(folder / name)
            models[name] = str(folder / name)
    used = {cell.precision for cell in cells} | {PRECISIONS[cell.precision].base for cell in cells}
    losses = list(LOSSES) if "bfloat16" in used else list(dict.fromkeys(cell.loss for cell in cells))
    arguments = {"models": models, "losses": losses, "precisions": [p for p in PRECISIONS if p in used], "base": str(folder / "base.pt")}
    run_ranks("scripts.parity.matrix:base_runs", 1, folder / "one", arguments, timeout_s=300, show=show)
    found: dict[Cell, Found] = {}
    for ranks in sorted({LAYOUTS[cell.layout].ranks for cell in cells}):
        chosen = [cell for cell in cells if LAYOUTS[cell.layout].ranks == ranks]
        limit_s = 60 + 10 * ranks * len(chosen)
        told = {**arguments, "cells": [asdict(cell) for cell in chosen]}
        results = run_ranks("scripts.parity.matrix:run_cells", ranks, folder / f"ranks{ranks}", told, timeout_s=limit_s, show=show)[0]
        found.update({cell: Found(**{**result, "cell": cell}) for cell, result in zip(chosen, results, strict=True)})
    return [found[cell] for cell in cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("layouts", LAYOUTS), ("losses", LOSSES), ("rows", ROWS), ("precisions", PRECISIONS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices), metavar="NAME", help=", ".join(choices))
    parser.add_argument("--recompute", choices=("with", "without", "both"), default="both", help="full recompute (default: both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--from-json", type=Path, nargs="+", metavar="FILE", help="run nothing; show what these hold")
    parser.add_argument("--docs", action="store_true", help="write the summary into docs/*/parity.md")
    options = parser.parse_args()
    if options.from_json:
        found = [f for path in options.from_json for f in load(path)]
    else:
        recompute = {"with": ["recompute"], "without": [""], "both": list(RECOMPUTE)}[options.recompute]
        cells = matrix(options.layouts, options.losses, options.rows, recompute, options.precisions)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = run_matrix(cells, Path(folder), show=True)
        print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        save(found, options.json)
    if options.docs:
        write_docs(found)
    print("\n".join([*table(found), *summary(found)]))
    wrong = over_limit(found)
    for f in wrong:
        print(f"OVER THE LIMIT {f.cell.name}: {f.apart}, gradient of {f.tensor}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
