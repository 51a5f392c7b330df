"""Three steps in float64 on models of several families: each layout compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parity.ranks import run_ranks

Cells = Sequence[tuple[str, str]]  # a family, and the flags of a layout
EXACT = dict.fromkeys(("loss", "gradients", "weights", "log_probs"), 1e-12)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"


@dataclass
class FamilyLayouts:
    """Runs of families in layouts of several ranks, compared with those of one."""

    folder: Path  # of the models
    make: Callable[[str, Path], object]  # writes a family's model into a folder
    flags: Callable[[str], str]  # of every run of a family
    limits: Mapping[str, float]  # how far a layout may be from one process
    timeout_s: float  # of one start
    _models: dict[str, str] = field(default_factory=dict)

    def check(self, ranks: int, cells: Cells, folder: Path) -> None:
        for found in self.measure(ranks, cells, folder):
            assert len(found) == len(cells)
            for name, apart in found.items():
                for what, limit in self.limits.items():
                    assert apart[what] < limit, (name, what, apart)

    def measure(self, ranks: int, cells: Cells, folder: Path) -> list[dict[str, dict[str, Any]]]:
        """By rank and cell, how far its numbers are from those of one process."""
        for family, _ in cells:
            self._run_on_one_process(family)
        return self._launch(ranks, cells, folder)

    def _run_on_one_process(self, family: str) -> None:
        """Once; its numbers lie next to the model."""
        if family not in self._models:
            model = self.folder / family.replace(" ", "-")
            self._models[family] = str(model)
            self.make(family, model)
            self._launch(1, [(family, "")], Path(f"{model}-one"))

    def _launch(self, ranks: int, cells: Cells, folder: Path) -> list[dict[str, dict[str, Any]]]:
        words = {
            f"{family} {layout}": (
                self._models[family],
                f"--micro-batch-size 2 --clip-grad 0 {self.flags(family)} {layout}",
            )
            for family, layout in cells
        }
        worker = "tests.dist.families_worker:run_cells"
        return run_ranks(worker, ranks, folder, {"cells": words}, timeout_s=self.timeout_s)
