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
    """Result of a cell: largest difference of each compared quantity (in bfloat16 ratios), the
    tensor with the largest gradient difference, and the seconds it took."""

    cell: Cell
    apart: dict[str, float]
    tensor: str
    seconds: float
    error: str = ""  # for a failed cell, which has no differences

    def of(self, word: str) -> float:
        return self.apart.get(word, float("inf"))

    @property
    def worst(self) -> float:
        return max(map(self.of, WORDS))


def over_limit(found: Iterable[Found]) -> list[Found]:
    """The cells over their limit; NaN counts as over."""
    return [
        f
        for f in found
        if f.error or not all(f.of(word) <= PRECISIONS[f.cell.precision].limit for word in WORDS)
    ]


@cache
def code_hash() -> str:
    """Hash of everything that a figure depends on: this code, its packages, and the CPU model."""
    hashed = hashlib.sha256(
        " ".join([platform.machine(), *(f"{name} {version(name)}" for name in PACKAGES)]).encode()
    )
    for path in (ROOT / name for name in CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            hashed.update(f"{file.relative_to(ROOT)} ".encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


def append(found: Found, path: Path, code: str) -> None:
    """Append a result. The line starts with its line break, so that a partial last line of a killed
    call does not corrupt it."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"code": code, **asdict(found)}))


class Folder:
    """Folder with models, single-process runs, and results of cells (one line each in cells.jsonl).
    fresh: ignore results of earlier calls."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results = path / "cells.jsonl"
        self.base = path / f"base-{code_hash()}.pt"
        if fresh:
            self.results.unlink(missing_ok=True)
        for old in path.glob("base-*"):
            if fresh or old != self.base:
                old.unlink()

    def lines(self) -> list[str]:
        text = self.results.read_text(encoding="utf-8") if self.results.exists() else ""
        return [line for line in text.split("\n") if line]

    def found(self, cells: Sequence[Cell]) -> list[Found]:
        """Results of `cells` with the current code, including failures. The last line of the file
        may be partial if a call was killed."""
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
        """(precision, model, loss) of the existing single-process runs."""
        return set(torch.load(self.base)) if self.base.exists() else set()

    def models(self) -> dict[str, str]:
        """Folder of each model by name; missing ones are created."""
        for name, make in MODELS.items():
            if not (self.path / name / "model.safetensors").exists():
                make(self.path / name)
        return {name: str(self.path / name) for name in MODELS}
