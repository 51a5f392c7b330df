"""Check pages with axe-core in a headless Chromium, in light and in dark:

python scripts/check_accessibility.py node_modules/axe-core/axe.min.js outputs/site/index.html 'report.html#curves'

Needs `pip install playwright`, `npm install axe-core` and a Chromium, Debian's or Playwright's.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SETTLED_MS = 1500  # for what a page draws after it was loaded


def violations(axe: str, pages: Sequence[str]) -> list[str]:
    """A line for each rule that a page breaks.

    Args:
        axe: the source of axe-core. pages: files, with #place where one has several.
    """
    found = []
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for name in pages:
                tab = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=scheme)
                file, _, place = name.partition("#")
                tab.goto(f"{Path(file).resolve().as_uri()}#{place}")
                tab.wait_for_timeout(SETTLED_MS)
                tab.evaluate(axe)
                for rule in tab.evaluate("axe.run()")["violations"]:
                    node = rule["nodes"][0]
                    why = node["any"][0]["message"] if node["any"] else rule["help"]
                    found.append(
                        f"{scheme} {name}: {rule['id']} ({rule['impact']}), {len(rule['nodes'])} times,"
                        f" first at {node['target']}: {why}"
                    )
                tab.close()
        browser.close()
    return found


if __name__ == "__main__":
    lines = violations(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:])
    print("\n".join(lines) or "no violations")
    sys.exit(bool(lines))
