"""tinker-cookbook in its own environment ($COOKBOOK_ENV, `make cookbook-env`), for the tests
that `make test-cookbook` runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, clean_environment
from tests.own_environment import demo, mark_tests_beside

__all__ = ("demo",)  # a fixture

Cookbook = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_beside(__file__, items, pytest.mark.cookbook)


@pytest.fixture
def cookbook(tmp_path: Path) -> Cookbook:
    """Runs the environment's Python in a folder, for the server at `url`; returns what it
    printed."""
    python = (
        Path(os.environ.get("COOKBOOK_ENV", ROOT / ".venv-cookbook")).resolve() / "bin" / "python"
    )
    assert python.exists(), f"{python} is not there: make cookbook-env"

    def run(*command: object, folder: Path = ROOT, url: str = "", typed: str = "") -> str:
        offline = {
            "HF_HUB_OFFLINE": "1",
            "TINKER_API_KEY": "tml-key-of-the-tests",
            "OMP_NUM_THREADS": "1",
            "TINKER_BASE_URL": url,  # for recipes without a base_url
        }
        done = subprocess.run(
            [str(python), *map(str, command)],
            cwd=folder,
            env={**clean_environment(), **offline},
            capture_output=True,
            text=True,
            input=typed,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run
