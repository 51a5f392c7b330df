"""A run's folder as plain data for the page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_like.metrics.logger import FILE_NAME, read_metrics
from slime_like.metrics.run_names import run_names
from slime_like.metrics.timeline import FOLDER as TIMELINE

DIGITS = 7  # significant digits of a number on the page
MAX_PHASES = 4000  # of a rank's timeline, the newest ones
MAX_STACK = 50_000  # characters of a rank's stacks
# written by `slime_like.logs`
ERROR_FILE = "error.txt"
LOG_FILE = "run.log"
# folders that the ranks write
STACKS = "stacks"
CERTIFICATES = "certificates"
PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Run:
    """Data of one run."""

    folder: Path
    name: str
    rows: list[dict[str, float]]  # of metrics.jsonl
    # of run.json; empty for a run of an earlier version
    record: Mapping[str, Any] = field(default_factory=dict)
    # by rank, ``[phase, begin, seconds, CPU seconds]``
    timeline: Mapping[int, list[list[Any]]] = field(default_factory=dict)
    log: tuple[str, ...] = ()  # lines of run.log and error.txt
    # by rank, the end of the output of `slime-like dump`
    stacks: Mapping[int, str] = field(default_factory=dict)
    profile: tuple[str, ...] = ()  # names of traces and snapshots
    certificates: tuple[Mapping[str, Any], ...] = ()  # of the run, the newest last

    def series(self, metric: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), row[metric]) for row in self.rows if metric in row]

    @property
    def metrics(self) -> list[str]:
        return sorted(set[str]().union(*self.rows) - {"step", "time"})


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run's files. Raises ValueError if the folder has no metrics, or a damaged metrics
    file."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{folder}: has no {FILE_NAME}; name the --output-dir of a run")
    return Run(
        folder,
        name or run_names([folder])[0],
        read_metrics(path),
        _json_object(folder / "run.json"),
        _timeline(folder / TIMELINE),
        (*_lines(folder / ERROR_FILE), *_lines(folder / LOG_FILE)),
        _stacks(folder / STACKS),
        tuple(sorted(path.name for path in (folder / PROFILE).glob("*"))),
        _certificates(folder / CERTIFICATES),
    )


def state_of(folder: Path) -> str:
    """Fingerprint that changes when a file that `read_run` reads has changed."""
    names = (FILE_NAME, "run.json", ERROR_FILE, LOG_FILE)
    paths = [folder / name for name in names]
    for part in (TIMELINE, STACKS, PROFILE, CERTIFICATES):
        paths += (folder / part).glob("*")
    states = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            states.append((path.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(sorted(states)).encode()).hexdigest()[:16]


def curves(run: Run) -> dict[str, object]:
    """Metrics as columns: null if missing or not finite; rollouts with non-finite values are listed
    in `bad`."""
    columns: dict[str, list[float | None]] = {}
    bad: dict[str, list[int]] = {}
    for name in run.metrics:
        column: list[float | None] = []
        for row in run.rows:
            value = row.get(name)
            if value is not None and not math.isfinite(value):
                bad.setdefault(name, []).append(int(row["step"]))
                value = None
            column.append(None if value is None else rounded(value))
        columns[name] = column
    return {
        "steps": [int(row["step"]) for row in run.rows],
        "times": [row.get("time") for row in run.rows],
        "metrics": columns,
        "bad": bad,
    }


def rounded(value: float) -> float | int:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def _json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _timeline(folder: Path) -> dict[int, list[list[Any]]]:
    timeline = {}
    for path in folder.glob("rank*.jsonl"):
        rank = path.stem.removeprefix("rank")
        rows = []
        for line in _lines(path)[-MAX_PHASES:]:
            try:
                row = json.loads(line)
            except ValueError:  # the truncated last line of a killed rank
                continue
            if isinstance(row, list) and len(row) == 4 and isinstance(row[0], str):
                rows.append(row)
        if rank.isdecimal() and rows:
            timeline[int(rank)] = rows
    return dict(sorted(timeline.items()))


def _certificates(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """What the page shows of each certificate."""
    found = []
    for path in folder.glob("rollout_*.json"):
        data = _json_object(path)
        sites = data.get("sites")
        if not isinstance(data.get("rollout"), int) or not isinstance(sites, dict):
            continue
        found.append(
            {
                "file": path.name,
                "rollout": data["rollout"],
                "holds": data.get("holds") is True,
                "layout": str(data.get("layout", "")),
                "engine": str(data.get("engine", "")),
                "reference": str(data.get("reference", "")),
                "texts": _finding_texts(data.get("findings")),
                "differences": _largest_differences(sites),
            }
        )
    return tuple(sorted(found, key=lambda row: row["rollout"]))


def _finding_texts(findings: object) -> list[str]:
    rows = findings if isinstance(findings, list) else []
    return [str(row.get("text", "")) for row in rows if isinstance(row, dict)]


def _largest_differences(sites: Mapping[str, Any]) -> dict[str, list[Any]]:
    """By trainer and engine, the site that is nearest to its limit, its difference and limit."""
    largest: dict[str, list[Any]] = {}
    for site, row in sites.items():
        for name, pair in row.items() if isinstance(row, dict) else ():
            if not (isinstance(pair, list) and len(pair) == 2):
                continue
            if not all(isinstance(x, int | float) and math.isfinite(x) for x in pair):
                continue
            share = pair[0] / max(pair[1], 1e-30)
            if name not in largest or share > largest[name][1] / max(largest[name][2], 1e-30):
                largest[name] = [site, rounded(pair[0]), rounded(pair[1])]
    return largest


def _stacks(folder: Path) -> dict[int, str]:
    """Stacks of the last request by rank, of the ranks that were asked."""
    stacks = {}
    for path in folder.glob("rank*.txt"):
        rank = path.stem.removeprefix("rank")
        text = "\n".join(_lines(path)[1:])
        if rank.isdecimal() and text:
            stacks[int(rank)] = text[text.rfind("--- ") :][:MAX_STACK]
    return dict(sorted(stacks.items()))


def _lines(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(text.removesuffix("\n").split("\n")) if text else ()
