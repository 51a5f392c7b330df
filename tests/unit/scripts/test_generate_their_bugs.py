"""The table of bugs of other trainers: current, well-formed, and of tests that exist and run."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from scripts.generate_their_bugs import functions_of, link_of, named_by, page, read
from tests.paths import ROOT

BUGS = [bug for group in read() for bug in group["bugs"]]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_current(language: str) -> None:
    path = ROOT / "docs" / language / "their_bugs.md"
    assert path.read_text(encoding="utf-8") == page(language), (
        "python scripts/generate_their_bugs.py"
    )


def test_reports_are_well_formed_and_listed_once() -> None:
    assert len(BUGS) >= 30
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#[1-9]\d*", bug["at"]) for bug in BUGS)
    names = sorted(bug["at"] for bug in BUGS)
    assert not [a for a, b in pairwise(names) if a == b]
    assert link_of("a/b#7") == "https://github.com/a/b/issues/7"
    assert not [b["at"] for b in BUGS if {"at", "en", "zh", "tests"} != b.keys()]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["at"])
def test_its_tests_are_there_and_run_in_continuous_integration(bug: dict) -> None:
    """make test and make test-extended are whole in .ci/run; of make test-slow it names files."""
    ci = (ROOT / ".ci/run").read_text()
    assert "make test-extended" in ci and re.search(r"^make test$", ci, re.MULTILINE)
    tests = list(named_by(bug))
    assert tests
    assert any(t.suite != "slow" or f"tests/{t.path}" in ci for t in tests)


def test_a_missing_test_is_named() -> None:
    with pytest.raises(ValueError, match=r"a/b#1: unit/test_docs.py has no test_nothing"):
        list(named_by({"at": "a/b#1", "tests": ["unit/test_docs.py: nothing"]}))


def test_marks_say_where_a_test_runs() -> None:
    parity = functions_of("dist/test_parity.py")
    assert (parity["test_layouts_with_ppo"], parity["test_layouts_with_sapo"]) == (
        "slow",
        "extended",
    )
    assert functions_of("dist/test_moe_aux.py")["test_gradients_and_values"] == "extended"
    faults = functions_of("e2e/test_checkpoint_faults.py")
    assert faults["test_killed_at_a_write_sync_or_rename"] == "make test"
