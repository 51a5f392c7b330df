"""The pictures of the documents: those drawn by `write_plot` have today's panels, and the runs that
`make pictures` makes are those of the page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import docs_pictures
from slime_like.metrics.logger import MetricsLogger
from slime_like.metrics.plot import PANELS, PHASES_TITLE
from tests.paths import ROOT


def test_pictures_have_todays_panels() -> None:
    """Those that `write_plot` drew say their panels; `make pictures` makes them again."""
    image = pytest.importorskip("PIL.Image", reason="pillow")
    panels = {panel.title for panel in PANELS} | {"Evaluation score", PHASES_TITLE}
    drawn = []
    for path in sorted((ROOT / "docs/images").glob("*.png")):
        with image.open(path) as picture:
            titles = picture.text.get("Description", "")
        if titles:
            assert set(titles.split("; ")) <= panels, path
            drawn.append(path.stem)
    assert "demo" in drawn


def test_the_first_runs_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], **settings: Any) -> None:
        name = docs_pictures._RUN.search(command[-1])
        assert name is not None and (settings["cwd"] / "run.yaml").is_file()
        ran.append(name[1])
        with MetricsLogger(settings["cwd"] / "outputs" / name[1]) as logger:
            for step in range(1, 11):
                reward = 0.25 if step <= 5 else 0.5
                logger.log(step, {"rollout/reward_mean": reward, "rollout/truncated_frac": 0.125})
        (settings["cwd"] / "outputs" / name[1] / "report.png").touch()

    monkeypatch.setattr(subprocess, "run", run)
    runs = docs_pictures.first_runs(tmp_path)
    assert list(runs) == ran == ["first_task", "first_reward", "first_data"]
    assert docs_pictures.first_runs(tmp_path) == runs and len(ran) == 3, "not repeated"
    assert (tmp_path / "my_rewards.py").is_file() and (tmp_path / "make_my_data.py").is_file()
    figures = docs_pictures.figures(runs["first_task"])
    assert figures == "0.25 -> 0.50, 0.12 truncated at the end"


def test_the_first_page_has_the_figures_of_first_runs() -> None:
    """README shows the pictures that the table of First runs describes."""
    rows = re.findall(
        r"^\| [a-z][^|]* \| (\d\.\d\d -> \d\.\d\d) \| \d\.\d\d \| (\d+) \|$",
        (ROOT / "docs/en/first_runs.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "README_zh.md").read_text(encoding="utf-8")
    for rewards, seconds in rows:
        assert f"{rewards} in {seconds} s:" in english
        assert f"{rewards}，{seconds} 秒：" in chinese
