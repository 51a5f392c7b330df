# PYTHON_ARGCOMPLETE_OK
"""Train: python train.py ... is one process, torchrun --nproc-per-node N train.py ... is N. --help lists the flags.

Exit status: 0 done, 1 an error during the run, 2 an error in the command line (every problem is listed).
"""

from __future__ import annotations

import os
import sys

from arguments.parse import parse_or_exit


def main() -> int:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = parse_or_exit(sys.argv[1:], world_size, rank)
    from slime_like.trainer.launch import (
        run,
    )  # torch and megatron-core come in only when the command line is right

    return run(config, rank)


if __name__ == "__main__":
    sys.exit(main())
