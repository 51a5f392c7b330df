"""Results of the parity matrix, cell by cell, and the folder that keeps them between calls."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.parity.cells import PRECISIONS, Cell
from benchmarks.parity.models import MODELS

ROOT = Path(__file__).parents[2]
WORDS = ("loss", "gradients", "weights", "log_probs")  # what is compared
# what a cell's figures depend on
CODE = (
    "slime_like",
    "arguments",
    "megatron_patches",
    *(f"benchmarks/parity/{name}.py" for name in ("cells", "models", "runs", "steps")),
)
PACKAGES = ("torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class Found:
    """A cell's largest differences, by what is compared (in bfloat16 their ratios), and the tensor
    of the largest gradient difference; seconds that it took. error: of a cell that did not get
    through, and has no differences."""

    cell: Cell
    apart: dict[str, float]
    tensor: str
    seconds: float
    error: str = ""

    def of(self, word: str) -> float:
        return self.apart.get(word, float("inf"))

    @property
    def worst(self) -> float:
        return max(map(self.of, WORDS))


def over_limit(found: Iterable[Found]) -> list[Found]:
    """The cells that fail. A figure that is not a number fails."""
    return [
        f
        for f in found
        if f.error or not all(f.of(word) <= PRECISIONS[f.cell.precision].limit for word in WORDS)
    ]


@cache
def code_hash() -> str:
    """Of all that a figure depends on: this code, the packages below it, the kind of processor."""
    hashed = hashlib.sha256(
        " ".join([platform.machine(), *(f"{name} {version(name)}" for name in PACKAGES)]).encode()
    )
    for path in (ROOT / name for name in CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            hashed.update(f"{file.relative_to(ROOT)} ".encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


def append(found: Found, path: Path, code: str) -> None:
    """A line begins with its line break: what a killed call left of its last one spoils no other."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"code": code, **asdict(found)}))


class Folder:
    """Models, the runs of one process, and the cells' figures: a line each in cells.jsonl. fresh:
    nothing of earlier calls is used."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.results, self.base = (
            path,
            path / "cells.jsonl",
            path / f"base-{code_hash()}.pt",
        )
        if fresh:
            self.results.unlink(missing_ok=True)
        for old in path.glob("base-*"):
            if fresh or old != self.base:
                old.unlink()

    def lines(self) -> list[str]:
        text = self.results.read_text(encoding="utf-8") if self.results.exists() else ""
        return [line for line in text.splitlines() if line]

    def found(self, cells: Sequence[Cell]) -> list[Found]:
        """Those of `cells` that this code has figures of, or that failed. The end of the file may
        be half a line, of a call that was killed."""
        seen: dict[Cell, Found] = {}
        for line in self.lines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry.pop("code") == code_hash():
                cell = Cell(**entry.pop("cell"))
                seen[cell] = Found(cell, **entry)
        return [seen[cell] for cell in cells if cell in seen]

    def add(self, found: Found) -> None:
        append(found, self.results, code_hash())

    def base_runs(self) -> set[tuple[str, str, str]]:
        """Precision, model and loss of the runs of one process that are there."""
        return set(torch.load(self.base)) if self.base.exists() else set()

    def models(self) -> dict[str, str]:
        """The model of each name, made where it is not there."""
        for name, make in MODELS.items():
            if not (self.path / name / "model.safetensors").exists():
                make(self.path / name)
        return {name: str(self.path / name) for name in MODELS}
