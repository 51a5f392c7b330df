"""The table and the pictures of the starters, from results that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import starter_table
from slime_like.cli.new import STARTERS
from slime_like.metrics.logger import MetricsLogger


def write_result(folder: Path, last: float) -> None:
    with MetricsLogger(folder / "outputs") as logger:
        logger.log(0, {"eval/heldout/mean": 0.25})
        logger.log(1, {"rollout/reward_mean": 0.5})
        logger.log(2, {"eval/heldout/mean": last})
    (folder / starter_table.SECONDS).write_text("61.4")


def test_results_become_tables_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, last in ((1, 0.875), (3, 1.0)):
        write_result(starter_table.folder_of("lora", seed, tmp_path), last)
    write_result(starter_table.folder_of("grpo", 1, tmp_path, "--lr 1.5e-2"), 0.5)
    table = starter_table.table([1, 2, 3], tmp_path, "en")
    assert table.splitlines()[2:] == ["| `lora` | 1: 0.25 -> 0.88, 3: 0.25 -> 1.00 | 61 |"]
    changed = starter_table.changed_table(tmp_path, "en")
    assert changed.splitlines()[2:] == ["| `--lr 1.5e-2` | 0: 0.25, 2: 0.50 | 61 |"]
    for name in ("starters.png", "changed.png"):
        path = tmp_path / name
        if name == "starters.png":
            starter_table.draw([1, 2, 3], tmp_path, path)
        else:
            starter_table.draw_changed(tmp_path, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "page.md"
    page.write_text(f"a\n{starter_table.BEGIN}old\n{starter_table.END}\nb\n")
    starter_table.put(page, table)
    assert page.read_text() == f"a\n{starter_table.BEGIN}{table}{starter_table.END}\nb\n"


def test_every_starter_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(folder: Path, starter: str, seed: int, changed: str) -> None:
        trained.append(starter)
        write_result(folder, 1.0)

    monkeypatch.setattr(starter_table, "train", train)
    for _ in range(2):
        for starter in STARTERS:
            starter_table.measure(starter, 1, tmp_path)
    assert trained == [*STARTERS]
    assert starter_table.table([1], tmp_path, "zh").count("1: 0.25 -> 1.00 | 61 |") == len(STARTERS)
