"""Write the output of a preflight into the pages that quote it.

    .venv/bin/python scripts/generate_preflight_doc.py          write docs/*/preflight.md
    .venv/bin/python scripts/generate_preflight_doc.py --check  exit 1 if a page is out of date

Seconds and host memory differ from run to run and do not count as out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / language / "preflight.md" for language in ("en", "zh")]
COMMAND = "--config examples/preflight/qwen3_235b_a22b.yaml --preflight --nodes 128"
_BLOCK = re.compile(r"(?<=\n\n)    preflight of .*?\n(?=\n)", re.DOTALL)
_WIDTH = 140


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    found = output()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        match = _BLOCK.search(text)
        assert match is not None, f"{page} has no output of a preflight"
        if comparable(match[0]) == comparable(found):
            continue
        if check:
            sys.exit(f"{page.relative_to(ROOT)} is out of date: run {Path(__file__).name}")
        page.write_text(text.replace(match[0], found), encoding="utf-8")


def output() -> str:
    """The output of COMMAND as an indented block."""
    done = subprocess.run(
        [sys.executable, "train.py", *COMMAND.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout[done.stdout.index("preflight of ") :]
    wrapped = (
        textwrap.wrap(line, _WIDTH, subsequent_indent="  ", drop_whitespace=False)
        if len(line) > _WIDTH
        else [line]
        for line in text.strip().split("\n")
    )
    return "".join(f"    {line.rstrip()}\n" for lines in wrapped for line in lines)


def comparable(block: str) -> str:
    """The block without what differs from run to run."""
    return re.sub(r"^ *took .*$", "", block, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
