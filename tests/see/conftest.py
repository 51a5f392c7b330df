"""What a user looks at: the report and the site in a headless Chromium, and the files of the real
trackers, in their own environment (`make see-env`), for the tests that `make test-see` runs.

The browser is Debian's (`apt-get install chromium`) or Playwright's (`playwright install chromium`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.own_environment import mark_tests_beside


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_beside(__file__, items, pytest.mark.see)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make see-env")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page that must ask no server for anything and say no error."""
    tab = browser.new_page(viewport={"width": 1100, "height": 800})
    tab.problems = []
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on("console", lambda message: message.type == "error" and tab.problems.append(message.text))
    tab.on(
        "request",
        lambda request: request.url.startswith("http") and tab.problems.append(request.url),
    )
    yield tab
    assert tab.problems == []
    tab.close()
