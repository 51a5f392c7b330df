"""What the end-to-end tests share: one train server, one workspace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.helpers import Workspace, make_workspace
from tests.e2e.programs import TrainServer


@pytest.fixture(scope="session")
def server() -> Iterator[TrainServer]:
    with TrainServer() as running:
        yield running


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("workspace"))
