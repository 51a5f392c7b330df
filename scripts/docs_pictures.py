"""Make the pictures of README.md and of the documents again, from the runs that they show:

    make pictures

Runs that are there are not repeated: the demos' in outputs/demo-sapo-tp2 and outputs/images-one,
those of the starters in outputs/starters (benchmarks/starter_table.py), and in outputs/first_runs
those of docs/en/first_runs.md, whose own files and commands are run. The figures of the latter are
printed, for the tables. Needs `make see-env` and a Chromium, Debian's or Playwright's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime_like.metrics.logger import FILE_NAME, read_metrics  # noqa: E402
from slime_like.metrics.plot import write_plot  # noqa: E402
from slime_like.report.page import MAX_SAMPLES, write_page  # noqa: E402
from slime_like.report.read import read_run  # noqa: E402
from slime_like.report.rollouts import read_samples  # noqa: E402

PICTURES = ROOT / "docs/images"
PAGE = ROOT / "docs/en/first_runs.md"
DEMO = "outputs/demo-sapo-tp2"
# folder of a demo, its picture, and what is above it
DEMOS = (
    (DEMO, "demo.png", "make demo"),
    ("outputs/images-one", "image_demo.png", "scripts/demo_images.sh"),
)
PANELS = ("Reward", "Response", "Truncated")
SETTLED_MS = 1000  # for what a page draws after loading
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
_RUN = re.compile(r"--output-dir outputs/(first_\w+)")


def first_runs(folder: Path) -> dict[str, Path]:
    """The runs of PAGE, by the name of their folder: what is missing is run, as the page says."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.py", DEMO):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    runs: dict[str, Path] = {}
    for language, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "yaml":
            (folder / "run.yaml").write_text(text, encoding="utf-8")
        elif language == "python" and (named := _FILE.match(text)):
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "bash" and (found := _RUN.search(text)):
            runs[found[1]] = folder / "outputs" / found[1]
            if not (runs[found[1]] / "report.png").exists():
                print(f"{found[1]}: {run_seconds(text, folder):.0f} s of CPU time", flush=True)
    return runs


def run_seconds(commands: str, folder: Path) -> float:
    """Run a block of the page; returns its seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(run: Path) -> str:
    """What the tables say of one of the first runs."""
    rows = [row for row in read_metrics(run / FILE_NAME) if "rollout/reward_mean" in row]

    def mean(metric: str, part: slice) -> float:
        values = [row[metric] for row in rows[part]]
        return sum(values) / len(values)

    first, last = (mean("rollout/reward_mean", part) for part in (slice(5), slice(-5, None)))
    truncated = mean("rollout/truncated_frac", slice(-5, None))
    return f"{first:.2f} -> {last:.2f}, {truncated:.2f} truncated at the end"


def plots(runs: dict[str, Path]) -> None:
    """The curves that a run draws at its end."""
    for folder, picture, title in DEMOS:
        rows = read_metrics(ROOT / folder / "rl" / FILE_NAME)
        write_plot(rows, PICTURES / picture, title=title)
    for name, run in runs.items():
        rows = read_metrics(run / FILE_NAME)
        write_plot(rows, PICTURES / f"{name}.png", title=name, only=PANELS)
        print(f"{name}: {figures(run)}")


def reports(starters: Path) -> None:
    """The report of two starters in a browser: its first page, and a response of the model."""
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme="light")
        show(tab, starters / "grpo-1/outputs", "write_twice", "overview")
        tab.screenshot(path=PICTURES / "report.png")
        tab = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme="dark")
        tool = starters / "tool-1/outputs"
        show(tab, tool, "sums", f"rollouts/0/{almost_right(tool)}")
        tab.select_option("#colour", "entropy")
        tab.screenshot(path=PICTURES / "report_rollouts.png")
        browser.close()


def almost_right(run: Path) -> int:
    """A response of the first rollout with the right call of the tool, and then a wrong answer: its
    id."""
    samples = read_samples([read_run(run)], MAX_SAMPLES)
    columns = samples.columns
    return next(
        columns["id"][i]
        for i, text in enumerate(columns["response"])
        if columns["rollout"][i] == 1
        and text.startswith(samples.prompts[columns["prompt"][i]].rstrip("=") + ";")
        and columns["reward"][i] < 1
    )


def show(tab: Any, run: Path, name: str, place: str) -> None:
    page = write_page([read_run(run, name)], run / "report.html")
    tab.goto(f"{page.resolve().as_uri()}#{place}")
    tab.wait_for_selector("html[data-ready]")
    tab.wait_for_timeout(SETTLED_MS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first-runs", type=Path, default=ROOT / "outputs/first_runs")
    parser.add_argument("--starters", type=Path, default=ROOT / "outputs/starters")
    parser.add_argument("--only", choices=("plots", "reports"), help="default: both")
    options = parser.parse_args()
    if options.only != "reports":
        plots(first_runs(options.first_runs))
    if options.only != "plots":
        reports(options.starters)


if __name__ == "__main__":
    main()
