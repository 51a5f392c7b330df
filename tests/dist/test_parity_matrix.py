"""The parity matrix: a part of its cells, and that a wrong figure is seen. `make parity-full` runs all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scripts.parity.cells import PRECISIONS, Cell
from scripts.parity.matrix import run_matrix
from scripts.parity.report import WORDS, Found, over_limit, table

LIMIT = PRECISIONS["float32"].limit

# every precision; gradients in what the other tests of layouts leave out: padded rows, budgets and full recompute beyond context parallelism
IN_MAKE_TEST = (
    Cell("PP2", "ppo", "padded", "recompute"),
    Cell("DP2 distributed optimizer", "cispo", "budgets", "recompute"),
    Cell("TP2 SP", "sapo", "padded", ""),
    Cell("PP2 VP2", "gspo", "budgets", "recompute"),
    Cell("experts EP2", "sapo", "budgets", "recompute"),
    Cell("experts TP2 EP2", "gspo", "packed", "", "float64"),
    Cell("TP2", "gmpo", "packed", "", "bfloat16"),
)


@pytest.mark.slow
def test_some_cells(tmp_path: Path) -> None:
    found = run_matrix(IN_MAKE_TEST, tmp_path)
    assert [f.cell for f in found] == list(IN_MAKE_TEST)
    assert not over_limit(found), "\n".join(table(found))


@pytest.mark.parametrize("value", [2 * LIMIT, float("nan")])
@pytest.mark.parametrize("word", WORDS)
def test_a_figure_over_the_limit_fails(word: str, value: float) -> None:
    good = Found(IN_MAKE_TEST[0], dict.fromkeys(WORDS, LIMIT / 2), "w", 1.0)
    wrong = dataclasses.replace(good, cell=IN_MAKE_TEST[1], apart={**good.apart, word: value})
    assert over_limit([good, wrong]) == [wrong]
