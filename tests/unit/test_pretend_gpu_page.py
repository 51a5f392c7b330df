"""The pages list what runs on the pretend GPU; checked without one."""

from __future__ import annotations

from itertools import chain

from tests.pretend_gpu import test_engine, test_parity, test_runs, test_settings
from tests.pretend_gpu.waits_budget import PAGES

ONE_BY_ONE = "one by one"  # of every family, which the pages say in words


def test_every_cell_and_run_is_listed() -> None:
    """In "Rehearsed without one" of docs/*/performance.md, where a new one needs its name."""
    names = {
        *chain(test_parity.ONE, test_parity.TWO, test_settings.ONE, test_settings.TWO),
        *chain.from_iterable(test_engine.SETTINGS.values()),
        *chain(test_runs.RUNS, test_runs.FAMILIES),
    }
    for page in PAGES.values():
        text = page.read_text()
        missing = {n for n in names if f"`{n}`" not in text and not n.endswith(ONE_BY_ONE)}
        assert missing == set(), page
