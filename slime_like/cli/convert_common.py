"""Helpers of the conversion commands: errors, processes, verification, progress bar."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.config import ConfigError
from slime_like.errors import RunError

if TYPE_CHECKING:
    from arguments.hf.model import HfModel
    from slime_like.conversion.to_hf import NetworkSource

USAGE = 2
DAMAGE = 1
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
VERIFY: dict[str, Any] = {
    "choices": ("checksums", "logits"),
    "nargs": "+",
    "default": [],
    "help": "compare both formats afterwards. checksums: every parameter, bit by bit; logits: of "
    "transformers' model and of megatron-core's on fixed tokens, in float32, where rank 0 needs "
    "memory for the full model",
}
WORKERS: dict[str, Any] = {
    "type": int,
    "default": min(4, os.cpu_count() or 1),
    "help": "threads per process; each writes a file and holds one parameter",
}
_WAIT_FOR_RANK_0_S = 5.0
_MALLOC_MMAP_THRESHOLD = -3  # from malloc.h
MIB = 2**20


class UsageError(ValueError):
    """An invalid flag value; the message names the flag and the remedy."""


def rank_and_world() -> tuple[int, int]:
    """Rank and world size set by torchrun; without it a single process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_workers(workers: int) -> None:
    if workers < 1:
        raise UsageError(f"--workers {workers}: must be >= 1")


def warn_of_tokenizer(hf: HfModel, folder: str) -> None:
    """Warn on rank 0 if training could not use the folder's tokenizer, which conversion does not
    need. Tokenizers with custom code are not checked."""
    from slime_like.data.tokenizer import load_tokenizer

    if rank_and_world()[0] != 0 or next(Path(folder).glob("*.py"), None) is not None:
        return
    try:
        load_tokenizer(folder, vocab_size=hf.gpt.get("vocab_size"), trust_remote_code=False)
    except ValueError as error:
        print(
            f"warning: {error}; the weights are converted without it", file=sys.stderr, flush=True
        )


def exit_status(body: Callable[[], int]) -> int:
    """Run `body` and return its exit status: 2 for an invalid flag, 1 if something is damaged,
    unreadable or unwritable, each reported by rank 0 in one sentence. SLIME_LIKE_TRACEBACK=1 in the
    environment also shows the traceback."""
    try:
        return body()
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


def verify(
    kinds: list[str], source: NetworkSource, folder: str, *, share: int, show: bool
) -> list[str]:
    """Run the checks; returns messages about those that passed. Collective. share: bytes that this
    rank compares. Raises ValueError."""
    from slime_like.conversion.verify import TOKENS, compare_bits, compare_logits

    lines = []
    if "checksums" in kinds:
        with progress("comparing", share, show=show) as bar:
            number = compare_bits(source, folder, bar)
        lines.append(
            f"verified: all {number} parameters of {source.stored.folder} and {folder} have the "
            "same bits"
        )
    if "logits" in kinds:
        difference = compare_logits(source, folder)
        lines.append(
            f"verified: logits of {TOKENS} tokens in both formats differ by at most "
            f"{difference:.2g} standard deviations"
        )
    return lines


def progress_title(title: str, world: int) -> str:
    return title if world == 1 else f"{title}, rank 0 of {world}"


@contextmanager
def progress(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Progress bar in bytes on stderr. Yields a function to call with the bytes of each step, from
    any thread."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(title, total=total)
        yield lambda size: bar.advance(task, size)
