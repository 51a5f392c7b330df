"""Shared by the benchmarks: sequence lengths, timing, machine information, JSON output."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def lognormal_lengths(
    count: int, *, median: float = 665.0, longest: int = 8192, seed: int = 0
) -> NDArray[np.int64]:
    """Lengths whose logarithm is normal with deviation 1: many short ones, few very long ones."""
    return (
        np.random.default_rng(seed)
        .lognormal(np.log(median), 1.0, count)
        .clip(16, longest)
        .astype(np.int64)
    )


def bimodal_lengths(
    count: int, *, short: float = 500.0, long: float = 8000.0, seed: int = 0
) -> NDArray[np.int64]:
    """Nine of ten sequences near `short`, one of ten near `long`: answers, and answers with long
    reasoning."""
    rng = np.random.default_rng(seed)
    is_long = rng.random(count) < 0.1
    lengths = np.where(
        is_long, rng.normal(long, long / 16, count), rng.normal(short, short / 5, count)
    )
    return lengths.clip(4).astype(np.int64)


LENGTHS: dict[str, Callable[..., NDArray[np.int64]]] = {
    "lognormal": lognormal_lengths,
    "bimodal": bimodal_lengths,
}


def fastest(
    function: Callable[[], T],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, T]:
    """(seconds of the fastest of `repeats` calls, what the last one returned). clock:
    time.process_time counts this process's own seconds only, which other work on the machine
    disturbs less."""
    assert repeats > 0
    for _ in range(warm_up):
        function()
    seconds = []
    for _ in range(repeats):
        start = clock()
        result = function()
        seconds.append(clock() - start)
    return min(seconds), result


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(values) over log(sizes) by least squares: 1 where values grow linearly, 2
    where they grow with the square."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def machine() -> dict[str, Any]:
    """Where the numbers come from. load: processes that wanted a core in the last minute, these
    among them."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load": round(os.getloadavg()[0], 1),
    }


def write_json(path: Path | None, results: Any) -> None:
    """The results and the machine, where a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"machine": machine(), "results": results}, indent=1) + "\n",
            encoding="utf-8",
        )
        print(f"written: {path}")
