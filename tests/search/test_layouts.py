"""Random runs of every family in random layouts, compared with one process: losses, log-probs, every
gradient and the weights of three steps in float64, and the gradient norm.

    make search-layouts SEED=7 EXAMPLES=200

With OTHER_PYTHON, an interpreter of an environment with another megatron-core (make newest-env),
half of the runs take that release; they too are compared with one process of this one. What the
arguments refuse is not run. docs/en/megatron_faults.md has the seeds that were run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from arguments.hf.model import read_hf_model
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from tests.dist.test_families import CASES
from tests.dist.test_prediction import CASES as PREDICTING
from tests.search.layouts import Draw, draws

WORKER = "tests.search.search_worker:run_layouts"
OTHER_PYTHON = os.environ.get("OTHER_PYTHON")
EXAMPLES = int(os.environ.get("SEARCH_EXAMPLES", "20"))
LOG = os.environ.get("SEARCH_LOG")  # a file to which every run is appended
LIMIT = 1e-10  # the largest seen is about 1e-13
FIGURES = ("loss", "gradients", "log_probs", "weights", "grad_norm")


@dataclass
class Search:
    """Runs draws; models and runs of one process are made once."""

    folder: Path
    count: int = 0
    refused: int = 0
    compared: int = 0
    failures: list[str] = field(default_factory=list)

    def model(self, family: str, predicting: bool) -> Path:
        """Of four layers."""
        folder = self.folder / f"{family} {predicting}".replace(" ", "-")
        if not folder.exists():
            like, changes = CASES[family]
            changes = {k: v for k, v in changes.items() if k != "num_hidden_layers"}
            if predicting:
                changes |= PREDICTING[family][0]
            if "layer_types" in changes:
                changes["layer_types"] = [*changes["layer_types"], "full_attention"]
            make_tiny_model(like, folder, num_hidden_layers=4, **changes)
        return folder

    def launch(self, draw: Draw, ranks: int, layouts: list[str], base: Path) -> dict[str, Any]:
        """What each layout found, maximised over ranks: a text where it is refused or fails."""
        self.count += 1
        folder = self.folder / str(self.count)
        arguments = {
            "model": str(self.model(draw.family, draw.predicting)),
            "flags": draw.flags,
            "layouts": layouts,
            "base": str(base),
        }
        python = OTHER_PYTHON if draw.release == "other" and ranks > 1 else sys.executable
        try:
            found = run_ranks(
                WORKER, ranks, folder, arguments, timeout_s=600, python=python or sys.executable
            )
        except AssertionError as error:
            if len(layouts) == 1:
                return {layouts[0]: f"FAILED {error}"}
            parts = [self.launch(draw, ranks, [layout], base) for layout in layouts]
            return {k: v for part in parts for k, v in part.items()}
        return {
            flags: first
            if isinstance(first, str)
            else {word: max(rank[flags][word] for rank in found) for word in first}
            for flags, first in found[0].items()
        }

    def run(self, draw: Draw) -> None:
        base = self.model(draw.family, draw.predicting) / f"{hash(draw.flags)}.pt"
        if not base.exists():
            ((_, refusal),) = self.launch(draw, 1, ["--micro-batch-size 1"], base).items()
            if refusal:
                self.report(draw, "one process", refusal)
                return
        for flags, apart in self.launch(draw, draw.ranks, list(draw.layouts), base).items():
            self.report(draw, flags, apart)

    def report(self, draw: Draw, flags: str, apart: Any) -> None:
        if isinstance(apart, str):
            bad = apart.startswith("FAILED")
            self.refused += not bad
        else:
            bad = not all(apart[word] <= LIMIT for word in FIGURES)
            self.compared += 1
        if bad:
            self.failures.append(
                f"{draw.family}, {draw.ranks} processes, release {draw.release}, "
                f"predicting {draw.predicting}: {draw.flags} {flags}\n{apart}"
            )
        if LOG:
            line = {**dataclasses.asdict(draw), "layouts": flags, "found": apart, "bad": bad}
            with Path(LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")


def with_experts(folder: Path) -> frozenset[str]:
    """The families of `CASES` that have experts."""
    search = Search(folder)
    return frozenset(
        name
        for name in CASES
        if read_hf_model(str(search.model(name, False))).transformer.get("num_moe_experts")
    )


@pytest.mark.search
@pytest.mark.timeout(24 * 3600)
def test_random_layouts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    search = Search(tmp_path)
    releases = ("this", "other") if OTHER_PYTHON else ("this",)

    # a failure is reported with its one layout's flags: hours of shrinking would say no more
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=False, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(draw=draws(with_experts(tmp_path), releases))
    def run(draw: Draw) -> None:
        search.run(draw)

    run()
    print(f"{search.compared} layouts compared, {search.refused} refused")
    assert search.compared, "everything was refused"
    assert not search.failures, "\n\n".join(search.failures)
