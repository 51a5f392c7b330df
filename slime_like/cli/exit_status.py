"""How the conversion commands and `inspect` begin and end: on the CPU, and with an error in one
sentence."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from slime_like.config import ConfigError
from slime_like.errors import RunError

USAGE = 2
DAMAGE = 1
_WAIT_FOR_RANK_0_S = 5.0
_MALLOC_MMAP_THRESHOLD = -3  # from malloc.h
MIB = 2**20


class UsageError(ValueError):
    """An invalid flag value; the message names the flag and the remedy."""


def rank_and_world() -> tuple[int, int]:
    """Rank and world size set by torchrun; without it a single process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def exit_status(body: Callable[[], int]) -> int:
    """Run `body` and return its exit status: 2 for an invalid flag, 1 if something is damaged,
    unreadable or unwritable, each reported by rank 0 in one sentence. SLIME_LIKE_TRACEBACK=1 in the
    environment also shows the traceback."""
    try:
        return body()
    except BrokenPipeError:  # the reader of the output has ended: `until_closed` does in silence
        raise
    except (ConfigError, ValueError, OSError, RunError) as error:
        rank, world = rank_and_world()
        if os.environ.get("SLIME_LIKE_TRACEBACK"):
            raise
        if rank == 0:
            print(
                f"error: {error}".replace("error: error: ", "error: "), file=sys.stderr, flush=True
            )
        elif world > 1:  # torchrun ends all ranks as soon as the first one exits
            time.sleep(_WAIT_FOR_RANK_0_S)
        return USAGE if isinstance(error, ConfigError | UsageError) else DAMAGE
    except KeyboardInterrupt:
        print("interrupted; repeat the same command to continue", file=sys.stderr, flush=True)
        return 130


def on_the_cpu() -> None:
    """Must be called before importing torch: conversion uses no accelerator, and allocates no
    memory on one. Also makes glibc return large blocks to the system when they are freed; it would
    otherwise keep them without reusing them, so that memory grows with the model."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with suppress(OSError, AttributeError):  # a different C library
        ctypes.CDLL(None).mallopt(_MALLOC_MMAP_THRESHOLD, MIB)
