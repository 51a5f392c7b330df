"""Startup progress before the first rollout or request, which takes seconds of imports: one line
per phase, on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]


class Startup:
    """Called at the start of each startup phase; shows its name, with the seconds since this object
    was created."""

    def __init__(self, rank: int) -> None:
        self._show = rank == 0
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        if self._show:
            print(f"start {time.monotonic() - self._began:4.1f} s: {what}", flush=True)
