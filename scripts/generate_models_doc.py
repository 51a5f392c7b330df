"""Write the table of figures and of other frameworks' support into docs/en/models.md and
docs/zh/models.md from docs/models.yaml, with the largest figures in the text before it, and the
number of architectures into the support pages: python scripts/generate_models_doc.py [--check]
[--figures out.json].

--figures takes what benchmarks/families_table.py --json has measured into docs/models.yaml. Every
registered family has a row, "not measured" if it has no figures; further cases have one if they
were measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime_like.weights.families import model_families  # noqa: E402

DATA = ROOT / "docs" / "models.yaml"
FIGURES = ("logits fp32", "gradients fp32", "logits fp64", "gradients fp64", "packed fp64")
LAYOUTS = "layouts fp64"
PEERS = ("slime", "SkyRL", "verl", "NeMo-RL")
HEADS = {
    "en": ("architecture", *FIGURES, LAYOUTS, *PEERS),
    "zh": (
        *("架构", "logits fp32", "梯度 fp32", "logits fp64", "梯度 fp64", "打包 fp64", "布局 fp64"),
        *PEERS,
    ),
}
NOT_MEASURED = {"en": "not measured", "zh": "未测"}
# what the text says of the largest figures, and of the number of architectures
LARGEST = {
    "en": r"measured: at most [-.e0-9]+ and [-.e0-9]+, [-.e0-9]+ and [-.e0-9]+,",
    "zh": r"实测最大 [-.e0-9]+ 与 [-.e0-9]+、[-.e0-9]+ 与 [-.e0-9]+：",
}
COUNT = {"en": r"\[\d+ architectures\]\(models\.md\)", "zh": r"\[\d+ 种架构\]\(models\.md\)"}
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def load() -> dict[str, dict[str, Any]]:
    """By case of benchmarks/families_table.py: `figures`, and `peers`, each as far as known."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    missing = [name for name in model_families.names() if name not in rows]
    if missing:
        raise SystemExit(f"{DATA}: no rows of {', '.join(missing)}")
    return rows


def figure(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def table(rows: dict[str, dict[str, Any]], language: str) -> str:
    architectures = model_families.names()
    more = [name for name in rows if name not in architectures and rows[name].get("figures")]
    names = [*architectures, *more]
    lines = [HEADS[language], ("---",) * len(HEADS[language])]
    for name in names:
        row = rows[name]
        figures = row.get("figures") or {}
        unknown = "" if figures else NOT_MEASURED[language]
        lines.append(
            (
                f"`{name}`" if name in architectures else name,
                *(figure(figures.get(key)) or unknown for key in (*FIGURES, LAYOUTS)),
                *(row.get("peers", {}).get(peer, "") for peer in PEERS),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def largest(rows: dict[str, dict[str, Any]], key: str) -> str:
    """The largest figure of the column."""
    found = ((row.get("figures") or {}).get(key) for row in rows.values())
    return figure(max(value for value in found if value is not None))


def replaced(pattern: str, text: str, page: Path) -> str:
    """The page's content with `text` for its only place that matches `pattern`."""
    content, places = re.subn(pattern, text, page.read_text(encoding="utf-8"))
    assert places == 1, f"{page} has {places} places like {pattern}"
    return content


def models_page(rows: dict[str, dict[str, Any]], language: str) -> tuple[Path, str]:
    """The page of models, with the table between its marks and the figures of its text."""
    path = ROOT / "docs" / language / "models.md"
    values = iter([largest(rows, key) for key in FIGURES[:4]])
    text = re.sub(r"\[-.e0-9\]\+", lambda _: next(values), LARGEST[language])
    head, _, rest = replaced(LARGEST[language], text, path).partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{path} has no marks of the table"
    return path, f"{head}{BEGIN}\n{table(rows, language)}\n{END}{tail}"


def support_page(language: str) -> tuple[Path, str]:
    """The page of what is supported, with the number of architectures."""
    path = ROOT / "docs" / language / "support.md"
    text = COUNT[language].replace(r"\d+", str(len(model_families.names()))).replace("\\", "")
    return path, replaced(COUNT[language], text, path)


def take_figures(path: Path) -> None:
    """Put measured figures into docs/models.yaml."""
    rows = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    for name, *measured in json.loads(path.read_text(encoding="utf-8"))["results"]["rows"]:
        values = dict(zip(FIGURES, measured)) | {LAYOUTS: measured[-1]}
        rows.setdefault(name, {})["figures"] = {k: float(f"{v:.1e}") for k, v in values.items()}
    write(rows)


def write(rows: dict[str, dict[str, Any]]) -> None:
    text = yaml.safe_dump(rows, sort_keys=True, allow_unicode=True, width=100)
    DATA.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the pages are out of date")
    parser.add_argument("--figures", type=Path, metavar="out.json")
    args = parser.parse_args()
    if args.figures:
        take_figures(args.figures)
    rows = load()
    pages = [page for lang in HEADS for page in (models_page(rows, lang), support_page(lang))]
    stale = [(path, text) for path, text in pages if path.read_text("utf-8") != text]
    for path, text in stale:
        if args.check:
            print(f"{path} is out of date: python scripts/generate_models_doc.py")
        else:
            path.write_text(text, encoding="utf-8")
    if args.check:
        return int(bool(stale))
    return 0


if __name__ == "__main__":
    sys.exit(main())
