"""Promise 2, in full: every loss in every layout gives the numbers of one process. One command, one
table.

    python benchmarks/parity/matrix.py  # everything: `make parity-full`
    python benchmarks/parity/matrix.py --layouts CP2 "TP2 PP2" --losses gspo  # some
    # begin nothing after five minutes; call again for the rest
    python benchmarks/parity/matrix.py --minutes 5
    # run nothing; the results so far, into the pages on parity
    python benchmarks/parity/matrix.py --show --docs

A cell is one loss in one layout, with rows that are packed, padded (--qkv-format bshd) or cut by
token budgets, with or without full recompute: three optimizer steps (Adam, weight decay, clipping,
KL and entropy terms) on samples of uneven lengths with holes in their masks, other samples on every
data-parallel rank. Compared with one process that takes one packed sample at a time: the loss and
all gradients of each step, log-probs before the first and parameters after the third. A gradient or
parameter counts by tensor: norm of the difference over norm. The figure of a cell is its largest.

float32: limit 1e-5. float64: against one process in float64, limit 1e-12; here nothing but an error
can differ, however badly a network is conditioned. bfloat16: against one process in float32, all
gradients and all parameters taken as one, in multiples of what one process in bfloat16 is off from
it (in the worst loss); limit 2.

The layouts of the experts run a Qwen3-MoE with auxiliary coefficients 0 (no token is ever dropped),
the others a Qwen3 model. One set of processes serves all cells of one world size.

A cell's figures are a line of cells.jsonl in --folder as soon as they are there, together with a
hash of the code that gave them. A further call runs what has no line of the same code yet, and what
failed; --fresh forgets them all.

Exit status 1 when a cell fails or is over its limit, 3 when all is well so far and cells are left.
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

from benchmarks.parity.cells import (  # noqa: E402
    LAYOUTS,
    LOSSES,
    PRECISIONS,
    RECOMPUTE,
    ROWS,
    Cell,
    base_runs_of,
    by_sizes,
    matrix,
)
from benchmarks.parity.ranks import run_ranks  # noqa: E402
from benchmarks.parity.report import summary, table, write_docs  # noqa: E402
from benchmarks.parity.results import Folder, Found, code_hash, over_limit  # noqa: E402

GIVE_UP = 3  # consecutive launches that fail in their first cell: the cells are not the cause


def run_matrix(
    cells: Sequence[Cell], folder: Folder, *, seconds: float = float("inf"), show: bool = False
) -> list[Found]:
    """Results of the cells, including those of earlier calls. Missing cells are run, with one
    launch per number of processes; none is started after `seconds`. If a cell ends its launch with
    an error, this is its result, and another launch continues with the next cell."""
    end = time.perf_counter() + seconds
    done = {f.cell for f in folder.found(cells) if not f.error}
    pending = [cell for cell in cells if cell not in done]
    if pending:
        arguments = {
            "models": folder.models(),
            "base": str(folder.base),
            "results": str(folder.results),
            "code": code_hash(),
        }
        if runs := [run for run in base_runs_of(pending) if run not in folder.base_runs()]:
            launch("base_runs", 1, {**arguments, "runs": runs}, show=show)
        for ranks in sorted({LAYOUTS[cell.layout].ranks for cell in pending}):
            own = [cell for cell in pending if LAYOUTS[cell.layout].ranks == ranks]
            in_turn = [cell for _, chosen in by_sizes(own) for cell in chosen]
            run_in_turn(in_turn, ranks, folder, arguments, end=end, show=show)
    return folder.found(cells)


def run_in_turn(
    cells: Sequence[Cell],
    ranks: int,
    folder: Folder,
    arguments: dict[str, Any],
    *,
    end: float,
    show: bool,
) -> None:
    """Run cells of one number of processes. Raises AssertionError if consecutive launches make no
    progress."""
    failures = 0
    while cells and (left := end - time.perf_counter()) > 0:
        before = len(folder.lines())
        try:
            launch(
                "run_cells",
                ranks,
                {**arguments, "cells": [asdict(cell) for cell in cells], "seconds": left},
                show=show,
            )
        except AssertionError as error:
            done = len(folder.lines()) - before
            failures = 1 if done else failures + 1
            if failures == GIVE_UP:
                raise
            folder.add(Found(cells[done], {}, "", 0.0, str(error)))
            cells = cells[done + 1 :]
        else:
            return


def launch(function: str, ranks: int, arguments: dict[str, Any], *, show: bool) -> None:
    limit_s = 300 + 10 * ranks * len(arguments.get("cells", ()))
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            f"benchmarks.parity.runs:{function}",
            ranks,
            Path(folder),
            arguments,
            timeout_s=limit_s,
            show=show,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, choices in (
        ("layouts", LAYOUTS),
        ("losses", LOSSES),
        ("rows", ROWS),
        ("precisions", PRECISIONS),
    ):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=list(choices),
            default=list(choices),
            metavar="NAME",
            help=", ".join(choices),
        )
    parser.add_argument(
        "--recompute",
        choices=("with", "without", "both"),
        default="both",
        help="full recompute (default: both)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "outputs" / "parity_matrix",
        help="figures, kept between calls (default: %(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="use nothing of earlier calls")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no further cell after these"
    )
    parser.add_argument("--show", action="store_true", help="run nothing; show what there is")
    parser.add_argument(
        "--docs", action="store_true", help="write the summary into docs/*/parity.md"
    )
    options = parser.parse_args(argv)
    recompute = {"with": ["recompute"], "without": [""], "both": list(RECOMPUTE)}[options.recompute]
    cells = matrix(options.layouts, options.losses, options.rows, recompute, options.precisions)
    folder = Folder(options.folder, fresh=options.fresh)
    start = time.perf_counter()
    seconds = 0.0 if options.show else 60 * options.minutes
    found = (
        run_matrix(cells, folder, seconds=seconds, show=True) if seconds else folder.found(cells)
    )
    print("\n".join([*table(found), *summary(found)]))
    print(
        f"{time.perf_counter() - start:.0f} s; the cells took {sum(f.seconds for f in found):.0f} "
        f"s; {len(cells) - len(found)} of {len(cells)} are left"
    )
    if options.docs:
        write_docs(found)
    wrong = over_limit(found)
    for f in wrong:
        print(f"OVER THE LIMIT {f.cell.name}: {f.error or f'{f.apart}, gradient of {f.tensor}'}")
    return 1 if wrong else 3 if len(found) < len(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
