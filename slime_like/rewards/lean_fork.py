"""Make forks of a process cheap by moving its memory into huge pages.

A fork copies the page tables and its exit frees them, which takes milliseconds for a hundred
megabytes in pages of 4 KiB. Linux 6.1 collapses them into pages of 2 MiB; elsewhere forks are only
slower.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MADV_COLLAPSE = 25
_HUGE = 2**21  # bytes of a huge page, with pages of 4 KiB


def map_of_memory() -> BinaryIO | None:
    """This process's memory map for `settle`, opened while /proc is still visible; None except on
    Linux."""
    try:
        return Path("/proc/self/maps").open("rb")
    except OSError:
        return None


def settle(memory: BinaryIO | None) -> None:
    """Prepare memory for forking after all imports: freeze the garbage collector, which would
    otherwise touch and thereby copy every page, and use huge pages where the kernel supports it.
    memory: `map_of_memory`, which is closed."""
    gc.collect()
    gc.freeze()
    if memory is not None:
        with memory:
            _collapse(memory.read().decode())


def _collapse(memory: str) -> None:
    """Collapse memory into huge pages, as far as possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in _own_memory(memory):
        first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if first < last:
            libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_MADV_COLLAPSE)
            )


def _own_memory(memory: str) -> Iterator[tuple[int, int]]:
    """(start, end) addresses of private, writable, anonymous memory."""
    for line in memory.splitlines():
        addresses, rights, _, _, inode, *name = line.split(None, 5)
        is_anonymous = not name or name[0] == "[heap]"
        if is_anonymous and rights.startswith("rw") and rights.endswith("p") and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
