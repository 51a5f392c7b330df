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
    """Runs the environment's Python in a folder; returns the last line that it printed."""
    python = (
        Path(os.environ.get("COOKBOOK_ENV", ROOT / ".venv-cookbook")).resolve() / "bin" / "python"
    )
    assert python.exists(), f"{python} is not there: make cookbook-env"

    def run(*command: object, folder: Path = ROOT) -> str:
        offline = {
            "HF_HUB_OFFLINE": "1",
            "TINKER_API_KEY": "tml-key-of-the-tests",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [str(python), *map(str, command)],
            cwd=folder,
            env={**clean_environment(), **offline},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return (done.stdout.strip().splitlines() or [""])[-1]

    return run
