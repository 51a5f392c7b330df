"""Training on one and two pretend GPUs gives the numbers of one CPU process: the cells of the parity
matrix, in float64 where the code allows it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.parity.cells import LAYOUTS, PRECISIONS, SHARDED, Cell, base_runs_of
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity.results import Folder, code_hash, over_limit

ONE = ("1", "experts 1")
TWO = (
    "TP2", "TP2 SP", "PP2", "PP2 VP2", "DP2", "DP2 distributed optimizer", "DP2 overlap", "CP2",
    "experts EP2", "experts ETP2", "experts TP2 EP2", "experts CP2 EP2",
)  # fmt: skip
CELLS = [
    Cell(
        layout, "ppo", "packed",
        precision="float32" if SHARDED in LAYOUTS[layout].flags else "float64",
    )
    for layout in (*ONE, *TWO)
] + [
    Cell("1", "sapo", "budgets", "recompute"), Cell("1", "gspo", "padded"),
    Cell("1", "ppo", "packed", precision="bfloat16"), Cell("PP2", "ppo", "budgets"),
    Cell("CP2", "cispo", "budgets"), Cell("TP2 SP", "ppo", "packed", precision="bfloat16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Figures of all cells; single-process runs are on the CPU."""
    return Folder(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_pretend_gpus_give_the_numbers_of_one_cpu_process(
    ranks: int, folder: Folder, environment: dict[str, str]
) -> None:
    cells = [cell for cell in CELLS if LAYOUTS[cell.layout].ranks == ranks]
    arguments: dict[str, Any] = {
        "models": folder.models(),
        "base": str(folder.base),
        "results": str(folder.results),
        "code": code_hash(),
    }
    runs = [run for run in base_runs_of(CELLS) if run not in folder.base_runs()]
    if runs:
        run_ranks(
            "benchmarks.parity.runs:base_runs",
            1,
            folder.path / "base",
            {**arguments, "runs": runs},
            200,
        )
    arguments |= {"cells": [asdict(cell) for cell in cells], "seconds": 1e9}
    run_ranks(
        "benchmarks.parity.runs:run_cells", ranks, folder.path / str(ranks), arguments, 300,
        environment=environment,
    )  # fmt: skip
    found = folder.found(cells)
    assert [f.cell for f in found] == cells
    assert not over_limit(found), [
        (f.cell.name, f.apart, PRECISIONS[f.cell.precision].limit) for f in over_limit(found)
    ]
