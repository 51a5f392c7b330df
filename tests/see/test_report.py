"""The report in a headless Chromium: what a reader sees, by keyboard too, and how soon."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

from slime_like.metrics.logger import MetricsLogger
from slime_like.report.page import page, write_page
from slime_like.report.read import Run, read_run
from slime_like.report.rollouts import COLUMNS, Samples
from tests.unit.report.runs import HOSTILE, write_run

MANY, OPENS_IN_S = 10_000, 15.0  # about 1 s where no other program runs


def show(tab: Any, path: Path, place: str) -> None:
    tab.goto("about:blank")
    tab.goto(f"file://{path}#{place}")
    tab.wait_for_selector("html[data-ready]")


def written(folder: Path, *others: Run) -> Path:
    return write_page([read_run(write_run(folder)), *others], folder / "report.html")


def test_every_part_is_drawn(tab: Any, tmp_path: Path) -> None:
    with MetricsLogger(tmp_path / "b") as logger:
        logger.log(1, {"rollout/reward_mean": 0.3, "train/skipped_steps": 1.0})
    path = written(tmp_path / "a", read_run(tmp_path / "b"))
    places = ["overview", "curves", "time", "counters", "rollouts", "settings", "environment"]
    for place in places:
        show(tab, path, place)
        assert tab.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{place}"
        assert len(tab.inner_text("#main")) > 20, place
    show(tab, path, "overview")
    assert "optimizer steps were skipped" in tab.inner_text(".alerts .error a")
    assert "--lr-warmup-iters helps" in tab.inner_text(".alerts .error p")
    tab.wait_for_selector("figure canvas")
    first = tab.locator("figure").first
    assert "reward_mean by rollout. a: first 0.1" in first.locator(".plot").get_attribute(
        "aria-label"
    )
    assert first.locator(".title").inner_text() == "Reward"
    assert first.locator(".values").inner_text().split() == ["0.2", "0.3"], "the last of each run"
    assert not tab.locator(".u-legend").count()
    show(tab, path, "settings")
    assert tab.locator("tr", has_text="--lr").locator("mark").inner_text() == "0.001"


def test_the_first_page_has_facts_and_what_the_model_says(tab: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path, rollouts=3)
    (folder / "run.json").write_text(json.dumps({"environment": {"commit": "0123456789ab-dirty"}}))
    show(tab, write_page([read_run(folder)], folder / "report.html"), "overview")
    facts = tab.inner_text(".facts").replace("\n", " ")
    assert "Reward, first → last 0.1 → 0.3" in facts and "Commit 0123456789, changed" in facts
    rows = [
        text.split("\t") for text in tab.inner_text(".answers tbody >> nth=0").split("\n") if text
    ]
    assert rows[0] == ["Rollout 1"]
    assert tab.locator(".answers tbody").count() == 2
    best, worst = (tab.locator(".answers tbody tr", has_text=word) for word in ("best", "worst"))
    assert best.first.locator(".answer").inner_text() == HOSTILE
    assert worst.first.locator(".answer").inner_text() == "wrong\nline"
    best.first.locator(".answer").click()
    assert tab.url.endswith("#rollouts/0/0")


def test_each_source_of_a_mix_has_its_curves(tab: Any, tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        for step in range(3):
            values = {"rollout/reward_mean": 0.5}
            for name in ("easy", "hard.2"):
                values |= {f"rollout/{name}/reward_mean": 0.1, f"rollout/{name}/pass_rate": 0.2}
            logger.log(step, values)
    show(tab, write_page([read_run(tmp_path)], tmp_path / "report.html"), "overview")
    titles = tab.locator("figure .title").all_inner_texts()
    assert titles[0] == "Reward"
    for name in ("easy", "hard.2"):
        assert {f"Reward: {name}", f"Pass rate: {name}"} <= set(titles)


def test_a_slow_rank_is_visible(tab: Any, tmp_path: Path) -> None:
    """Full colours are work and pale ones are waiting."""
    folder = write_run(tmp_path)
    (folder / "timeline").mkdir()
    for rank in range(3):
        rows = [["train", 1e9 + i, 1.0, 1.0 if rank == 1 else 0.25] for i in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"timeline/rank{rank}.jsonl").write_text(text)
    show(tab, write_page([read_run(folder)], folder / "report.html"), "time")
    assert tab.locator(".gantt text.slow").all_text_contents() == ["rank 1 slow"]
    assert "slow: rank 1;" in tab.locator(".gantt").get_attribute("aria-label")
    phase = tab.locator(".gantt g").first
    length, work = (float(phase.locator("rect").nth(i).get_attribute("width")) for i in (0, 1))
    assert work == 0.25 * length
    assert phase.locator("rect").first.get_attribute("fill-opacity") == "0.25"


def test_all_curves_are_printed_and_one_run_needs_no_choice(tab: Any, tmp_path: Path) -> None:
    """A curve is drawn when it comes into view, and a printer scrolls to none."""
    show(tab, written(tmp_path), "curves")
    tab.set_viewport_size({"width": 360, "height": 300})
    show(tab, tmp_path / "report.html", "curves")
    tab.wait_for_selector("figure canvas")
    assert tab.locator("figure canvas").count() < tab.locator("figure").count()
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("figure canvas").count() == tab.locator("figure").count()
    show(tab, tmp_path / "report.html", "time")
    assert not tab.locator("select").count()


def test_a_sample_by_its_address_and_its_tokens(tab: Any, tmp_path: Path) -> None:
    show(tab, written(tmp_path), "rollouts/0/10")
    tab.wait_for_selector(".tokens")
    assert tab.inner_text(".tokens") == HOSTILE
    assert tab.evaluate("window.hacked") is None
    assert tab.locator(".detail h2").inner_text().startswith("reward 1 · advantage 1")
    assert "<b>search</b>" in tab.inner_text(".detail")
    tab.select_option("#colour", "diff")
    first = tab.locator(".tokens > span").first
    assert "trainer - engine 0.25" in first.get_attribute("title")
    assert "not trained on" in tab.locator(".tokens > span").nth(1).get_attribute("title")
    assert "rgba" in first.get_attribute("style")


def test_keyboard_search_and_sort(tab: Any, tmp_path: Path) -> None:
    show(tab, written(tmp_path), "overview")
    tab.keyboard.press("5")
    tab.wait_for_selector("#samples .row")
    tab.focus("#samples")
    tab.keyboard.press("ArrowDown")
    assert tab.url.endswith("#rollouts/0/11")
    assert tab.locator(".row[aria-selected=true]").count() == 1
    tab.keyboard.press("End")
    assert tab.url.endswith("#rollouts/0/1")
    tab.keyboard.press("/")
    tab.keyboard.type("WRONG")
    assert tab.locator("#samples .row").count() == 2
    assert "2 of 4 samples" in tab.inner_text(".controls [role=status]")


def test_a_narrow_screen_needs_no_sideways_scrolling(tab: Any, tmp_path: Path) -> None:
    path = written(tmp_path)
    tab.set_viewport_size({"width": 360, "height": 700})
    for place in ("overview", "curves", "rollouts", "settings", "environment"):
        show(tab, path, place)
        tab.wait_for_timeout(100)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, place
        box = tab.locator("[role=tab][aria-selected=true]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, place


def test_an_answer_is_as_wide_as_a_narrow_screen(tab: Any, tmp_path: Path) -> None:
    path = written(tmp_path)
    tab.set_viewport_size({"width": 390, "height": 800})
    show(tab, path, "overview")
    row = tab.locator(".answers tbody tr", has_text="best").first
    boxes = [
        row.locator(f"td[data-part='{part}']").bounding_box()
        for part in ("prompt", "the model says")
    ]
    prompt, says = boxes
    assert prompt["width"] == says["width"] > 340 and says["y"] >= prompt["y"] + prompt["height"]
    assert tab.locator(".answers thead").inner_text(), "for who hears the table"


def test_the_axis_of_a_flat_curve_fits(tab: Any, tmp_path: Path) -> None:
    """uPlot alone shows 0 to 100 for a curve of zeros."""
    with MetricsLogger(tmp_path) as logger:
        for step in range(1, 4):
            flat = {"rollout/failed_frac": 0.0, "train/skipped_steps": 2.0}
            logger.log(step, {**flat, "rollout/reward_mean": step / 10})
    show(tab, write_page([read_run(tmp_path)], tmp_path / "report.html"), "curves")
    tab.wait_for_function("openCharts.size === 3")
    ranges = tab.evaluate(
        "Object.fromEntries([...openCharts].map((c) => [c.root.parentElement.getAttribute"
        "('aria-label').split(' ')[0], [c.scales.y.min, c.scales.y.max]]))"
    )
    assert ranges["rollout/failed_frac"] == [0, 1] and ranges["train/skipped_steps"] == [1, 3]
    low, high = ranges["rollout/reward_mean"]
    assert low <= 0.1 and 0.3 <= high < 0.4


def test_the_theme_is_kept_and_has_contrast(tab: Any, tmp_path: Path) -> None:
    show(tab, written(tmp_path), "overview")
    for _ in range(2):
        colours = tab.evaluate(
            "['--bg', '--panel', '--fg', '--muted', '--accent', '--bad', '--warn'].map((name) => cssColour(name))"
        )
        for colour in colours[2:]:
            assert min(contrast(colour, colours[0]), contrast(colour, colours[1])) >= 4.5, colour
        before = tab.evaluate("document.documentElement.dataset.theme")
        tab.click("#theme")
        assert tab.evaluate("document.documentElement.dataset.theme") != before


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours, as #rrggbb."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_many_samples_open_soon(tab: Any, tmp_path: Path) -> None:
    """10,000 samples of about 150 tokens: the page is usable, and so is one of them."""
    rng = random.Random(1)
    packed = base64.b64encode(bytes(300)).decode()
    tokens = base64.b64encode(bytes(600)).decode()
    words = [f"word{i}" for i in range(500)]
    c: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for i in range(MANY):
        row = (
            0,
            i // 256 + 1,
            i // 8,
            i,
            rng.random(),
            "completed",
            150,
            i // 8,
            " ".join(rng.choices(words, k=100)),
            "42",
            None,
            0.5,
        )
        for name, value in zip(c, row):
            c[name].append(value)
    details = [
        {"tokens": tokens, **dict.fromkeys(("log_prob", "diff", "entropy", "advantage"), packed)}
    ] * MANY
    samples = Samples(c, [f"prompt {i}" for i in range(MANY // 8)], details, {"0": "a"})
    write_run(tmp_path)
    path = tmp_path / "report.html"
    path.write_text(page([read_run(tmp_path)], samples))
    show(tab, path, "rollouts/0/9000")
    ready_s = float(tab.evaluate("document.documentElement.dataset.ready")) / 1000
    tab.wait_for_selector(".tokens")
    assert tab.locator("#samples .row").count() < 60
    print(json.dumps({"ready_s": ready_s, "MB": path.stat().st_size / 1e6}))
    assert ready_s < OPENS_IN_S
