"""The parity matrix: a part of its cells, and that a wrong figure is seen. `make parity-full` runs
all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import matrix
from benchmarks.parity.cells import PRECISIONS, Cell
from benchmarks.parity.matrix import run_matrix
from benchmarks.parity.report import table
from benchmarks.parity.results import WORDS, Folder, Found, append, over_limit

LIMIT = PRECISIONS["float32"].limit

# every precision; gradients in what the other tests of layouts leave out: padded rows, budgets and
# full recompute beyond context parallelism
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
    found = run_matrix(IN_MAKE_TEST, Folder(tmp_path))
    assert [f.cell for f in found] == list(IN_MAKE_TEST)
    assert not over_limit(found), "\n".join(table(found))


@pytest.mark.parametrize("value", [2 * LIMIT, float("nan")])
@pytest.mark.parametrize("word", WORDS)
def test_a_figure_over_the_limit_fails(word: str, value: float) -> None:
    good = Found(IN_MAKE_TEST[0], dict.fromkeys(WORDS, LIMIT / 2), "w", 1.0)
    wrong = dataclasses.replace(good, cell=IN_MAKE_TEST[1], apart={**good.apart, word: value})
    assert over_limit([good, wrong]) == [wrong]


def figures(cell: Cell) -> Found:
    return Found(cell, dict.fromkeys(WORDS, LIMIT / 2), "w", 1.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Without models, whose making takes seconds."""
    monkeypatch.setattr(Folder, "models", lambda self: {})
    return Folder(tmp_path / "matrix")


def launches(
    monkeypatch: pytest.MonkeyPatch,
    folder: Folder,
    *,
    fails: tuple[Cell, ...] = (),
    at_once: int = 100,
) -> list[list[Cell]]:
    """Cells have figures without running; `fails` end their launch, which begins no more than
    `at_once`. Gives the cells of each launch."""
    seen: list[list[Cell]] = []

    def launch(function: str, ranks: int, arguments: dict[str, Any], *, show: bool) -> None:
        if function == "base_runs":
            return
        seen.append([])
        for cell in [Cell(**cell) for cell in arguments["cells"]][:at_once]:
            seen[-1].append(cell)
            if cell in fails:
                raise AssertionError(f"{cell.name} failed")
            folder.add(figures(cell))

    monkeypatch.setattr(matrix, "launch", launch)
    return seen


def test_a_second_call_runs_what_is_left(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        Cell(layout, loss, "packed")
        for layout in ("TP2", "PP2", "TP2 PP2")
        for loss in ("ppo", "gspo")
    ]
    seen = launches(monkeypatch, folder, at_once=3)
    first = run_matrix(cells, folder)
    assert seen == [cells[:3], cells[4:]] and [f.cell for f in first] == [*cells[:3], *cells[4:]]
    with folder.results.open("a") as file:
        file.write('\n{"code": "an')  # a call that was killed while it wrote
    assert [f.cell for f in Folder(folder.path).found(cells)] == [*cells[:3], *cells[4:]]
    assert run_matrix(cells, folder, seconds=0.0) == first and len(seen) == 2, (
        "out of time before it began"
    )
    assert run_matrix(cells, folder) == [figures(cell) for cell in cells] and seen[2:] == [
        [cells[3]]
    ]
    run_matrix(cells, folder)
    assert len(seen) == 3
    assert not Folder(folder.path, fresh=True).found(cells)


def test_figures_of_other_code_do_not_count(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("TP2", "ppo", "packed")
    append(figures(cell), folder.results, "another")
    assert not folder.found([cell])
    seen = launches(monkeypatch, folder)
    assert run_matrix([cell], folder) == [figures(cell)] and seen == [[cell]]


def test_a_cell_that_ends_its_launch_is_reported_and_the_others_continue(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell("TP2", loss, "packed") for loss in ("ppo", "gspo", "gmpo", "cispo")]
    seen = launches(monkeypatch, folder, fails=(cells[1],))
    found = run_matrix(cells, folder)
    assert seen == [cells[:2], cells[2:]] and [f.error for f in found] == [
        "",
        "TP2 | packed | gspo failed",
        "",
        "",
    ]
    assert over_limit(found) == [found[1]]
    assert "OVER THE LIMIT" in "\n".join(table(found))
    launches(monkeypatch, folder)
    assert run_matrix(cells, folder) == [figures(cell) for cell in cells], "it is run again"


def test_it_gives_up_when_every_launch_fails(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell("TP2", loss, "packed") for loss in ("ppo", "sapo", "gspo", "gmpo", "cispo")]
    seen = launches(monkeypatch, folder, fails=tuple(cells))
    with pytest.raises(AssertionError, match="gspo failed"):
        run_matrix(cells, folder)
    assert len(seen) == matrix.GIVE_UP


def test_exit_status(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when all cells are there and hold, 3 when some are left, 1 when one is over its limit."""
    words = [
        "--layouts",
        "TP2",
        "--losses",
        "ppo",
        "gspo",
        "--rows",
        "packed",
        "--recompute",
        "without",
        "--precisions",
        "float32",
        "--show",
    ]
    ppo, gspo = (figures(Cell("TP2", loss, "packed")) for loss in ("ppo", "gspo"))

    def call() -> tuple[int, str]:
        return matrix.main([*words, "--folder", str(folder.path)]), capsys.readouterr().out

    folder.add(ppo)
    status, shown = call()
    assert status == 3 and "1 of 2 are left" in shown
    folder.add(gspo)
    assert call()[0] == 0
    folder.add(dataclasses.replace(gspo, apart={**gspo.apart, "weights": 2 * LIMIT}))
    status, shown = call()
    assert status == 1 and "OVER THE LIMIT TP2 | packed | gspo" in shown
