# PYTHON_ARGCOMPLETE_OK
"""Entry point of a training run.

    python train.py ...                             one process
    torchrun --nproc-per-node N train.py ...        N processes
    python train.py --help                          all flags

Exit status: 0 success; 1 an error during the run; 2 an invalid command line, with every problem
listed; 75 checkpoint saved after SIGTERM or SIGHUP (resumable); 130 Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys

from slime_like.distributed.signals import end_at_once, leave_status
from slime_like.logs import set_up_logging
from slime_like.metrics.startup import Startup

ANSWERS = {"--help", "-h", "--version"}


def main() -> int:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    asks = bool(ANSWERS & set(sys.argv))
    if not asks:  # --help | head may close the pipe; only a run must survive that
        set_up_logging(rank)
    # during the slow imports
    end_at_once(rank, resumable=False, numbers=[signal.SIGINT, signal.SIGHUP])
    startup = Startup(rank)
    if not asks:
        startup("reading the command line, importing torch and megatron-core")
    from arguments.parse import parse_or_exit

    try:
        config = parse_or_exit(sys.argv[1:], world_size, rank)
    except SystemExit as ended:  # leave the status for a launch script, which must not restart it
        leave_status(int(ended.code or 0), rank)
        raise
    # imported late, so that a wrong command line is reported without waiting for the trainer
    from slime_like.trainer.launch import run

    return run(config, rank, startup)


if __name__ == "__main__":
    sys.exit(main())
