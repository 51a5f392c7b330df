"""Environments that others wrote, from their own packages in Python environments of their own
($ENVIRONMENTS_ENV, `make environments-env`), for the tests that `make test-environments` runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT
from tests.own_environment import mark_tests_beside


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_beside(__file__, items, pytest.mark.environments)


def python_of(package: str) -> Path:
    """The Python that has a package. Skips the test where its release needs a newer Python than
    there is."""
    folder = Path(os.environ.get("ENVIRONMENTS_ENV", ROOT / ".venv-environments"))
    python = folder.resolve() / package / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: make environments-env (Python 3.12 or newer)")
    return python


@contextlib.contextmanager
def running(command: list[str], url: str, folder: Path, log: Path) -> Iterator[None]:
    """A server that answers at `url`, with whatever status."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=kept, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + 240
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True
