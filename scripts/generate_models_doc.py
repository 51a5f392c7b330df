"""Write the table of figures and of other frameworks' support into docs/en/models.md and
docs/zh/models.md from docs/models.yaml: python scripts/generate_models_doc.py [--check]
[--figures out.json].

--figures takes what benchmarks/families_table.py --json has measured into docs/models.yaml. Every
registered family has a row; a figure that was not measured is empty.
"""

from __future__ import annotations

import argparse
import json
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
    names = [*architectures, *(name for name in rows if name not in architectures)]
    lines = [HEADS[language], ("---",) * len(HEADS[language])]
    for name in names:
        row = rows[name]
        figures = row.get("figures") or {}
        lines.append(
            (
                f"`{name}`" if name in architectures else name,
                *(figure(figures.get(key)) for key in (*FIGURES, LAYOUTS)),
                *(row.get("peers", {}).get(peer, "") for peer in PEERS),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page(language: str) -> Path:
    return ROOT / "docs" / language / "models.md"


def rendered(rows: dict[str, dict[str, Any]], language: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = page(language).read_text(encoding="utf-8").partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{page(language)} has no marks of the table"
    return f"{head}{BEGIN}\n{table(rows, language)}\n{END}{tail}"


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
    stale = [lang for lang in HEADS if rendered(rows, lang) != page(lang).read_text("utf-8")]
    if args.check:
        for language in stale:
            print(f"{page(language)} is out of date: python scripts/generate_models_doc.py")
        return int(bool(stale))
    for language in stale:
        page(language).write_text(rendered(rows, language), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
