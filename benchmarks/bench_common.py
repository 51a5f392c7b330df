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
    """Log-normal lengths with sigma 1: many short ones, few very long ones."""
    return (
        np.random.default_rng(seed)
        .lognormal(np.log(median), 1.0, count)
        .clip(16, longest)
        .astype(np.int64)
    )


def bimodal_lengths(
    count: int, *, short: float = 500.0, long: float = 8000.0, seed: int = 0
) -> NDArray[np.int64]:
    """90% of lengths near `short`, 10% near `long`, as for answers with and without long
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
    """(seconds of the fastest of `repeats` calls, result of the last one). clock: with
    time.process_time only CPU time of this process counts, which other load on the machine affects
    less."""
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
    """Least-squares slope of log(values) over log(sizes): 1 for linear growth, 2 for quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def machine() -> dict[str, Any]:
    """Description of the machine. load: load average of the last minute, including the benchmark's
    processes."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load": round(os.getloadavg()[0], 1),
    }


def write_json(path: Path | None, results: Any) -> None:
    """Write results and machine to `path`; no-op if it is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"machine": machine(), "results": results}, indent=1) + "\n",
            encoding="utf-8",
        )
        print(f"written: {path}")
