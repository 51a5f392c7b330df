"""Shared by the checks: sizes, timing and device memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# figures of one check; None if they do not apply to this device
Figures = dict[str, float | int | str | bool | list[str] | None]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the checks."""

    rehearse: bool  # tiny sizes that take no time on a CPU
    head: tuple[int, int, int]  # tokens, vocabulary, hidden size
    # tokens, query heads, query groups, head dimension
    attention: tuple[tuple[int, ...], int, int, int]
    steps: int  # training steps
    model_steps: int  # timed steps of the large models
    block: tuple[int, int]  # tokens and hidden size of the compiled block


FULL = Sizes(False, (32768, 151936, 2048), ((8192, 32768), 16, 8, 128), 5, 3, (8192, 2048))
REHEARSAL = Sizes(True, (64, 512, 16), ((96,), 4, 2, 8), 2, 1, (32, 16))


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def seconds(function: Callable[[], object], *, repeats: int = 5, warm_up: int = 2) -> float:
    """Seconds of the fastest of `repeats` calls, until their work on the device is finished."""

    def once() -> float:
        start = time.perf_counter()
        function()
        if has_gpu():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(warm_up):
        once()
    return min(once() for _ in range(repeats))


def peak_bytes(function: Callable[[], object]) -> int | None:
    """Peak GPU memory of `function` beyond what was allocated before; None on a CPU."""
    if not has_gpu():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
