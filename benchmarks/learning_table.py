"""The recipes of tests/learning over several seeds, as one table.

    # seeds 1 to 5, one run after the other
    python benchmarks/learning_table.py --output-dir outputs/learning_table
    python benchmarks/learning_table.py --output-dir outputs/learning_table --only copy --seeds 1 2
    # the results so far, into the docs
    python benchmarks/learning_table.py --output-dir outputs/learning_table --write-docs

A run that is there with the same flags is not repeated. --write-docs makes no run: it puts those
that are there into docs/*/algorithms/results.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.learning.recipes import COMMON, RECIPES, Recipe, Result, learn  # noqa: E402

BEGIN = "<!-- learning: made by benchmarks/learning_table.py -->\n"
END = "<!-- end of the learning table -->"
HEADINGS = {
    "en": ("task and estimator", "band at the end", "first -> last, by seed", "rollouts",
        "CPU seconds"),
    "zh": ("任务与估计", "结束时的下限", "各种子：最初 -> 最后", "rollout 数", "CPU 秒数"),
}  # fmt: skip


def record(recipe: Recipe, seed: int, out: Path) -> Path:
    """Path of the result of a run."""
    name = "".join(c if c.isalnum() else "_" for c in recipe.name)
    return out / f"{name}-{seed}.json"


def finished(recipe: Recipe, seed: int, out: Path) -> Result | None:
    """The result of an earlier run with the same flags; None without one."""
    path = record(recipe, seed, out)
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Result(**stored["result"]) if stored["flags"] == _flags(recipe) else None


def measure(recipe: Recipe, seed: int, out: Path) -> Result:
    """Run the recipe, unless there is a result."""
    result = finished(recipe, seed, out)
    if result is None:
        path = record(recipe, seed, out)
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        result = learn(recipe, seed, path.with_suffix(""))
        stored = {"flags": _flags(recipe), "result": asdict(result)}
        path.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    return result


def one_table(seeds: Sequence[int], out: Path, language: str) -> str:
    """Table of the existing results, in Markdown."""
    headings = HEADINGS[language]
    lines = [f"| {' | '.join(headings)} |", "|---|---:|---|---:|---:|"]
    for recipe in RECIPES:
        found = {seed: result for seed in seeds if (result := finished(recipe, seed, out))}
        if not found:
            continue
        runs = ", ".join(
            f"{seed}: {result.first:.2f} -> {result.last:.2f}" for seed, result in found.items()
        )
        rollouts = max(result.rollouts for result in found.values())
        seconds = sum(result.cpu_s for result in found.values()) / len(found)
        lines.append(
            f"| {recipe.name} | {recipe.end_at_least:g} | {runs} | {rollouts} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def write_docs(seeds: Sequence[int], out: Path) -> None:
    """Write the table between the marks of the results page, in both languages."""
    for language in HEADINGS:
        page = ROOT / "docs" / language / "algorithms" / "results.md"
        head, rest = page.read_text(encoding="utf-8").split(BEGIN)
        _, tail = rest.split(END)
        table = one_table(seeds, out, language)
        page.write_text(f"{head}{BEGIN}{table}\n{END}{tail}", encoding="utf-8")


def _flags(recipe: Recipe) -> str:
    return f"{COMMON} {recipe.flags}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "learning_table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", nargs="+", help="beginnings of recipe names")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    out = options.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.write_docs:
        write_docs(options.seeds, out)
        return 0
    missed = 0
    for seed in options.seeds:
        for recipe in RECIPES:
            if options.only and not any(recipe.name.startswith(word) for word in options.only):
                continue
            result = measure(recipe, seed, out)
            missed += not result.within(recipe)
            verdict = "ok" if result.within(recipe) else "OUTSIDE THE BAND"
            print(f"{recipe.name}, seed {seed}: {result} {verdict}", flush=True)
    print(f"\n{one_table(options.seeds, out, 'en')}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
