"""A process that forks often is made cheap to fork: its memory is brought into huge pages.

A fork copies the page tables, and its end gives them back: milliseconds for a hundred megabytes in
pages of 4 KiB. Linux 6.1 collapses them into pages of 2 MiB, of which there are fifty; elsewhere
nothing changes but the time.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MADV_COLLAPSE = 25
_HUGE = 2**21  # bytes of a huge page, where pages have 4 KiB


def map_of_memory() -> BinaryIO | None:
    """For `settle`, opened while this process sees /proc; None elsewhere than on Linux."""
    try:
        return Path("/proc/self/maps").open("rb")
    except OSError:
        return None


def settle(memory: BinaryIO | None) -> None:
    """Once all is imported that forks need: no collection of garbage looks at it again, which would
    touch, and thereby copy, every page; and it lies in huge pages where the kernel makes them.
    memory: `map_of_memory`, which is closed."""
    gc.collect()
    gc.freeze()
    if memory is not None:
        with memory:
            _collapse(memory.read().decode())


def _collapse(memory: str) -> None:
    """Best effort: what cannot be collapsed stays as it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in _own_memory(memory):
        first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if first < last:
            libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_MADV_COLLAPSE)
            )


def _own_memory(memory: str) -> Iterator[tuple[int, int]]:
    """First and last address of what is private, writable and of no file."""
    for line in memory.splitlines():
        addresses, rights, _, _, inode, *name = line.split(None, 5)
        ours = not name or name[0] == "[heap]"
        if ours and rights.startswith("rw") and rights.endswith("p") and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
