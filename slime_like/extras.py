"""How to install an extra of pyproject.toml. No package index has slime_like, so it is installed
from its clone."""

from __future__ import annotations

from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent


def pip_install(extra: str | None = None) -> str:
    """The pip command for an extra, or for slime_like alone.

    It names the clone's folder, so that it works from any folder. Where slime_like is imported from
    a built wheel, no clone is known; then the command is for the clone's root.
    """
    brackets = "" if extra is None else f"[{extra}]"
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '{CLONE}{brackets}'"
    return f"pip install -e '.{brackets}' in a clone of slime_like"
