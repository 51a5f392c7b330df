"""Keep home-made words out of code and documents: python scripts/lint_words.py.

Each word has a budget, the number of its uses when it was last counted. A budget may only be
lowered: new text says it in the words of Megatron, SGLang and slime instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("slime_like", "arguments", "megatron_patches", "scripts")
# word: (remaining uses, replacement)
BUDGETS = {
    "tell": (1, "report, return, log"),
    "tells": (1, "reports, says which"),
    "told": (0, "given, passed, warned"),
    "beside": (1, "with, next to"),
    "whose": (43, "with, where the"),
    "goes on": (0, "continues"),
    "go on": (0, "continue"),
    "of its own": (5, "its own, a separate"),
    "said": (0, "reported, given"),
    "stands": (7, "is"),
    "kin": (0, "variants"),
    "unwritten": (0, "empty"),
    "in force": (0, "active"),
}

# the same for the English documents, outside their code
DOCUMENT_BUDGETS = {
    "refused by name": (0, "rejected, not supported"),
    "kin": (0, "variants"),
    "beside": (0, "with, next to, in addition to"),
    "of its own": (2, "its own, a separate"),
    "of their own": (0, "their own, separate"),
    "of one's own": (0, "custom, your"),
    "of yours": (0, "your, custom"),
    "goes on": (0, "continues"),
    "go on": (1, "continue"),
    "tells": (0, "reports, shows"),
    "in force": (0, "active"),
}
GENERATED = ("flags.md", "http_api.md", "python_api.md", "their_bugs.md")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def uses(word: str, text: str) -> list[int]:
    """Line numbers of all uses of `word` in `text`. Parts of longer names, and methods of that
    name, do not count."""
    found = re.finditer(rf"(?<![\w.]){re.escape(word)}(?!\w)", text, re.IGNORECASE)
    return [text.count("\n", 0, match.start()) + 1 for match in found]


def sources(root: Path) -> Iterator[Path]:
    """The Python files to check, except this one, which contains every word."""
    for folder in FOLDERS:
        yield from (
            p for p in sorted((root / folder).rglob("*.py")) if p.name != Path(__file__).name
        )


def documents(root: Path) -> list[Path]:
    """The English documents that are not generated."""
    found = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found += [*(root / "docs").glob("*.md"), *(root / "docs/en").rglob("*.md")]
    found += (root / "scripts/recipes").rglob("*.md")
    return sorted(path for path in found if path.name not in GENERATED)


def prose(text: str) -> str:
    """A document without code; line numbers are preserved."""
    return _CODE.sub(lambda match: "\n" * match[0].count("\n"), text)


def problems(paths: Iterable[Path], budgets: dict[str, tuple[int, str]], root: Path) -> list[str]:
    """One message per word that exceeds its budget.

    Args:
        paths: Files in `root`.
        budgets: Word -> (number of allowed uses, suggested replacement).
    """
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    texts = {p: prose(text) if p.suffix == ".md" else text for p, text in texts.items()}
    messages = []
    for word, (budget, instead) in budgets.items():
        places = [
            f"{path.relative_to(root)}:{line}"
            for path, text in texts.items()
            for line in uses(word, text)
        ]
        if len(places) > budget:
            messages.append(
                f"{word!r}: {len(places)} uses, the budget is {budget}; say: {instead}. In: "
                + " ".join(places)
            )
    return messages


def main() -> int:
    """Print all problems; returns 1 if there are any."""
    found = problems(sources(ROOT), BUDGETS, ROOT)
    found += problems(documents(ROOT), DOCUMENT_BUDGETS, ROOT)
    for message in found:
        print(message, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
