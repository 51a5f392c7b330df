"""Fixtures of the tests on the pretend GPU; all are skipped where it can't be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.helpers import Workspace, make_workspace
from tests.e2e.programs import ENVIRONMENT, TrainServer
from tests.pretend_gpu.build import unavailable
from tests.pretend_gpu.environment import pretend

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the markers of -m are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("pretend_gpu")
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"pretend GPU: {reason}"))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of processes with two pretend GPUs."""
    return pretend(2)


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[TrainServer]:
    """Runs programs on the pretend GPU."""
    with TrainServer({**ENVIRONMENT, **environment}) as running:
        yield running


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("workspace"))
