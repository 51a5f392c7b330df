"""Fixtures shared by the end-to-end tests: a train server, a Tinker API server, a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="session")
def api(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tests.e2e.api_server.ApiServer, of three resident models and many more that wait in host
    memory."""
    from tests.e2e.api_server import ApiServer  # imports the SDK

    flags = (
        "--max-models",
        "99",
        "--max-resident-models",
        "3",
        "--max-resident-adapters",
        "1",
        "--max-sessions",
        "200",
        "--seq-gap-s",
        "2",
        "--max-body-mb",
        "8",
    )
    with ApiServer(work.model, tmp_path_factory.mktemp("api"), *flags) as running:
        yield running
