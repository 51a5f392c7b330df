# PYTHON_ARGCOMPLETE_OK
"""Train: python train.py ... is one process, torchrun --nproc-per-node N train.py ... is N. --help
lists the flags.

Exit status: 0 done, 1 an error during the run, 2 an error in the command line (every problem is
listed), 75 saved after SIGTERM or SIGHUP, 130 after Ctrl-C.
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
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    asks = bool(ANSWERS & set(sys.argv))
    if not asks:  # whoever reads --help may close the pipe: that is no run to keep alive
        set_up_logging(rank)
    end_at_once(rank, resumable=False, numbers=[signal.SIGINT])  # imports take seconds
    startup = Startup(rank)
    if not asks:
        startup("reading the command line, importing torch and megatron-core")
    from arguments.parse import parse_or_exit

    try:
        config = parse_or_exit(sys.argv[1:], world_size, rank)
    except SystemExit as ended:  # so that it is not started again
        leave_status(int(ended.code or 0), rank)
        raise
    # the trainer's modules come in only when the command line is right
    from slime_like.trainer.launch import run

    return run(config, rank, startup)


if __name__ == "__main__":
    sys.exit(main())
