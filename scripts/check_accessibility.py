"""Check pages with axe-core in a headless Chromium, in light, in dark and on a narrow screen:

.venv-see/bin/python scripts/check_accessibility.py outputs/site/index.html 'report.html#curves'

Needs `make see-env` and a Chromium, Debian's or Playwright's. tests/see checks a report and the
site."""

from __future__ import annotations

import importlib
import importlib.resources
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SETTLED_MS = 500  # for content that a page draws after loading
SCREENS = (("light", 1200), ("dark", 1200), ("light", 360))  # colour scheme, width in pixels


def axe_source() -> str:
    """axe-core's JavaScript, from the package axe-playwright-python."""
    files = importlib.resources.files("axe_playwright_python")
    return files.joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(browser: Any, axe: str, page: str, screens: Sequence[tuple[str, int]]) -> list[str]:
    """One line per rule that a page violates on one of the screens.

    Args:
        browser: Playwright's browser.
        axe: Source of axe-core.
        page: A file, optionally with #anchor.
        screens: See SCREENS.
    """
    return [line for screen in screens for line in _on_screen(browser, axe, page, screen)]


def _on_screen(browser: Any, axe: str, page: str, screen: tuple[str, int]) -> Iterator[str]:
    scheme, width = screen
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    file, _, place = page.partition("#")
    tab.goto(f"{Path(file).resolve().as_uri()}#{place}")
    tab.wait_for_timeout(SETTLED_MS)
    tab.evaluate(axe)
    found = tab.evaluate("axe.run()")
    tab.close()
    if not found["passes"]:
        yield f"{scheme} {width} {page}: axe-core found nothing to check"
    for rule in found["violations"]:
        node = rule["nodes"][0]
        why = node["any"][0]["message"] if node["any"] else rule["help"]
        yield (
            f"{scheme} {width} {page}: {rule['id']} ({rule['impact']}), {len(rule['nodes'])} "
            f"times, first at {node['target']}: {why}"
        )


def main(pages: Sequence[str]) -> int:
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        axe = axe_source()
        lines = [line for page in pages for line in violations(browser, axe, page, SCREENS)]
        browser.close()
    print("\n".join(lines) or "no violations")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
