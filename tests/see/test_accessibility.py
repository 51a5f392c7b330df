"""axe-core finds nothing wrong with a report and with the site, in light, in dark and on a narrow
screen; the search of the site finds words of both languages in pages that were opened from a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.check_accessibility import SCREENS, axe_source, violations
from slime_like.metrics.logger import MetricsLogger
from slime_like.report.page import write_page
from slime_like.report.read import read_run
from tests.e2e.programs import ROOT
from tests.unit.report.runs import write_run

PLACES = (
    *("overview", "curves", "time", "counters", "rollouts", "rollouts/0/10", "settings"),
    "environment",
)
PAGES = (
    *("index", "en/index", "en/see_a_run", "en/getting_started", "en/metrics", "en/concepts"),
    *(
        "flags",
        "python_api",
        "http_api",
        "zh/home",
        "zh/index",
        "zh/see_a_run",
        "zh/moe",
        "changelog",
    ),
)


@pytest.fixture(scope="session")
def axe() -> str:
    pytest.importorskip("axe_playwright_python", reason="no axe-core: make see-env")
    return axe_source()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="no MkDocs Material: make see-env")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, one of them with faults."""
    folder = tmp_path_factory.mktemp("report")
    with MetricsLogger(folder / "b") as logger:
        for step in range(1, 4):
            values = {"rollout/reward_mean": 0.1, "train/skipped_steps": float(step)}
            logger.log(step, values | {"train/loss": float("nan"), "perf/train_s": 1.0})
    runs = [read_run(write_run(folder / "a")), read_run(folder / "b")]
    return write_page(runs, folder / "report.html")


@pytest.mark.parametrize("place", PLACES)
def test_the_report(place: str, browser: Any, axe: str, report: Path) -> None:
    assert violations(browser, axe, f"{report}#{place}", SCREENS) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_site(page: str, browser: Any, axe: str, site: Path) -> None:
    assert violations(browser, axe, f"{site / page}.html", SCREENS) == []


def test_a_diagram_is_readable_on_a_narrow_screen(browser: Any, site: Path) -> None:
    """Its smallest letters are 9 pixels high or more, and the page itself needs no scrolling."""
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.goto((site / "index.html").as_uri())
    picture = tab.locator('img[src$="loop.svg"]')
    smallest, width = 12, 860  # font size and width in the file
    assert picture.bounding_box()["width"] * smallest / width >= 9
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert picture.locator("..").get_attribute("tabindex") == "0"
    tab.close()


def test_a_page_with_faults_is_found(browser: Any, axe: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<html><body><img src="x.png"><p style="color:#ccc">pale</p></body></html>')
    found = "\n".join(violations(browser, axe, str(bad), SCREENS[:1]))
    assert all(rule in found for rule in ("image-alt", "color-contrast", "html-has-lang"))


@pytest.mark.parametrize(
    ("page", "word", "there"),
    [
        ("en/moe", "router", "en/moe.html"),
        ("en/index", "rollout_batch_size", "en/rollouts.html"),
        ("en/index", "install flash attention", "en/getting_started.html"),
        ("zh/index", "安装 flash attention", "zh/getting_started.html"),
        ("zh/moe", "重放", "zh/moe.html"),
        ("zh/home", "优势", "zh/algorithms/advantages.html"),
        ("zh/home", "entropy", "zh/algorithms/kl_entropy.html"),
    ],
)
def test_the_search_finds(page: str, word: str, there: str, browser: Any, site: Path) -> None:
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    tab.goto((site / f"{page}.html").as_uri())
    tab.wait_for_selector(".md-search__input", state="attached")
    tab.keyboard.press("f")
    tab.wait_for_selector(".md-search__input:focus")
    tab.keyboard.type(word)
    for _ in range(60):
        tab.keyboard.press("Shift")  # the search looks when a key is let go
        tab.wait_for_timeout(1000)
        if tab.locator(".md-search-result__link").count():
            break
    assert re.search(r"\d", tab.inner_text(".md-search-result__meta"))
    links = [link.get_attribute("href") for link in tab.locator(".md-search-result__link").all()]
    assert any(f"/{there}" in link for link in links), links
    other = "/zh/" if page.startswith("en/") else "/en/"
    assert not [link for link in links if other in link], "in the language of the reader"
    tab.close()
