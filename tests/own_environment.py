"""Tests that need a separate environment, made by a Makefile target: their mark, and the demo that
they train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import make_demo

LIMIT_S = 900  # of a test, on a loaded machine with two cores


def mark_tests_beside(conftest: str, items: list[pytest.Item], mark: pytest.MarkDecorator) -> None:
    """Those in the folder of this conftest.py, with a limit on their time."""
    for item in items:
        if Path(str(item.fspath)).parent == Path(conftest).parent:
            item.add_marker(mark)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, tokenizer and prompts."""
    return make_demo(tmp_path_factory.mktemp("demo"))
