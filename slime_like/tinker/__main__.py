"""Serve the Tinker API: python -m slime_like.tinker ... on one process, torchrun -m
slime_like.tinker ... on several. --help lists the flags.

Exit status: 0 stopped, 1 an error, 2 an error in the command line (every problem is listed), 130
interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from slime_like.checkpoints.lock import FolderInUse, FolderLock
from slime_like.distributed.signals import CTRL_C_STATUS, end_with
from slime_like.logs import set_up_logging
from slime_like.metrics.startup import Startup

PRINT_AND_EXIT = {"--help", "-h", "--version"}
logger = logging.getLogger("slime_like.tinker")  # __name__ is __main__, a logger without handlers


def main() -> int:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        return serve(rank, world_size)
    except KeyboardInterrupt:  # during startup
        if rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return CTRL_C_STATUS


def serve(rank: int, world_size: int) -> int:
    """Start the server on this rank; returns the exit status. Raises SystemExit for --help and for
    errors in the command line."""
    startup = Startup(rank)
    if PRINT_AND_EXIT.isdisjoint(sys.argv):
        set_up_logging(rank)
        startup("reading the command line, importing torch and megatron-core")
    from arguments.parse import SERVER, parse_or_exit

    config = parse_or_exit(sys.argv[1:], world_size, rank, SERVER)
    lock = FolderLock(Path(config.server.server_dir).resolve(), "--server-dir")
    if rank == 0:
        try:
            lock.acquire()
        except (FolderInUse, OSError) as error:
            logger.error("%s", error)
            return 1
    # torch and megatron-core are imported only after the command line was validated
    from slime_like.tinker.launch import run

    try:
        return run(config, rank, startup)
    finally:
        if rank == 0:
            lock.release()


if __name__ == "__main__":
    end_with(main())
