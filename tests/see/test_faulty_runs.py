"""Runs of train.py that are made to fail: the report's first page names each fault, without
scrolling. PICTURES=docs/images keeps the screenshots that docs/en/see_a_run.md shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_like.report.page import write_page
from slime_like.report.read import read_run
from tests.e2e.helpers import Workspace, make_workspace
from tests.e2e.programs import TrainServer
from tests.fake_sglang import death, fake_servers

HEIGHT = 800  # of the window
REWARDS = """
import math

def sometimes_nan(args, sample):
    return math.nan if ord(sample.response[:1] or "a") % 11 == 3 else sum(c.isalpha() for c in sample.response) / 8

def letters_and_what_is_wanted(args, sample):
    # the reward pays for letters; the evaluation wants others beside them
    share = sum(c.isalpha() for c in sample.response) / max(len(sample.response), 1)
    return 1 - share if sample.label == "wanted" else share
"""


@pytest.fixture(scope="module")
def server() -> Iterator[TrainServer]:
    with TrainServer() as running:
        yield running


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("work"))


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def seen_at_once(tab: Any, out: Path, words: str, name: str, place: str = "overview") -> None:
    """`words` are in a line of the first page that needs no scrolling."""
    path = write_page([read_run(out)], out / "report.html")
    tab.set_viewport_size({"width": 1100, "height": HEIGHT})
    tab.goto(f"file://{path}#overview")
    tab.wait_for_selector("html[data-ready]")
    line = tab.locator(".alerts li", has_text=words)
    assert line.count() >= 1, tab.inner_text("#main")[:2000]
    box = line.first.bounding_box()
    assert box["y"] + box["height"] < HEIGHT
    if folder := os.environ.get("PICTURES"):
        tab.goto(f"file://{path}#{place}")
        tab.wait_for_timeout(1000)
        if place == "time":
            tab.locator(".gantt").scroll_into_view_if_needed()
        tab.screenshot(path=Path(folder) / f"report_{name}.png")


def test_rewards_that_are_nan(
    tab: Any, server: TrainServer, work: Workspace, rewards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "nan_rewards"
    flags = work.flags(out, num_rollout=6, custom_rm_path=f"{rewards}:sometimes_nan", max_failed_samples=0.3)  # fmt: skip
    server.train(flags, tmp_path / "log").ok()
    seen_at_once(tab, out, "rewards were not finite", "nan")
    tab.goto(f"file://{out}/report.html#counters")
    gate = tab.locator("tr", has_text="rewards are finite")
    assert "did not hold" in gate.inner_text() and " of 6" in gate.inner_text()
    if folder := os.environ.get("PICTURES"):
        tab.screenshot(path=Path(folder) / "report_guards.png")


def test_an_engine_that_dies(
    tab: Any, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "dead_engine"
    with fake_servers(str(work.model), 2) as servers:
        servers[0].faults = [None] * 20 + [death]
        flags = work.flags(
            out, rollout_engine="sglang", no_sglang_router="", update_weight_transport="disk", rollout_request_attempts=3,
            rollout_external_engine_addrs=" ".join(s.address for s in servers), rollout_request_timeout_s=8,
            rollout_health_check_interval=0.2, num_rollout=6,
        )  # fmt: skip
        server.train(flags, tmp_path / "log").ok()
    seen_at_once(tab, out, "rollout engines were lost in 1 rollout", "dead_engine")


def test_a_rank_that_is_slow(
    tab: Any, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "slow_rank"
    flags = work.flags(out, num_rollout=5, record_timeline="")
    hook = "tests.e2e.faults:work_in_phase train 1.5 1"
    server.train(flags, tmp_path / "log", ranks=2, hook=hook).ok()
    seen_at_once(tab, out, "rank 1 worked for", "slow_rank", "time")


def test_a_reward_that_is_gamed(
    tab: Any, server: TrainServer, work: Workspace, rewards: Path, tmp_path: Path
) -> None:
    out, wanted = tmp_path / "hacked_reward", tmp_path / "wanted.jsonl"
    rows = work.prompts.read_text().splitlines()[:8]
    cut = [row[: row.rindex('"answer"')] + '"answer": "wanted"}' for row in rows]
    wanted.write_text("\n".join(cut) + "\n")
    flags = work.flags(
        out, num_rollout=15, rollout_batch_size=8, n_samples_per_prompt=8, lr=1e-2, eval_prompt_data=f"wanted {wanted}", eval_interval=3,
        custom_rm_path=f"{rewards}:letters_and_what_is_wanted", n_samples_per_eval_prompt=4,
    )  # fmt: skip
    server.train(flags, tmp_path / "log").ok()
    seen_at_once(tab, out, "possible reward hacking", "hacked")
