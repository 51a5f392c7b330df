"""What runs are called in reports and plots, by their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# say nothing of the run: `slime-like new` writes into outputs, the demos into sft and rl
COMMON = ("output", "outputs", "rl", "run", "sft", "train")


def run_names(folders: Sequence[Path]) -> list[str]:
    """The last components of each path: as many as tell the runs apart, and one that is not COMMON
    where there is one."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    names: list[str] = []
    for depth in range(1, max(map(len, parts)) + 1):
        ends = [part[-depth:] for part in parts]
        if len(set(ends)) == len(ends):
            names = ["/".join(end) for end in ends]
            if not any(set(end) <= set(COMMON) for end in ends):
                break
    return names or [f"{folder.resolve().name} ({i + 1})" for i, folder in enumerate(folders)]
