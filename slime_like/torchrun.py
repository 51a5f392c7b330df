"""torchrun with the same flags, but with the exit status and output of the program it started:

    python -m slime_like.torchrun --nproc-per-node 2 train.py ...

The exit status is rank 0's, if it left one (0 success, 75 saved after SIGTERM, 130 Ctrl-C, 1
failure, 2 wrong command line); plain torchrun exits with 1 for all of these and prints tracebacks.
After Ctrl-C or SIGTERM ranks have SHUTDOWN_S seconds to finish the rollout and save; plain torchrun
allows 30.

With --nnodes MIN:MAX nodes may leave and rejoin. torchrun stops all ranks when a node rejoins; they
then have SHUTDOWN_S seconds too. Each rendezvous uses a store on its new rank 0, where plain
torchrun would send some ranks back to the store of an earlier rendezvous.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.distributed.signals import CTRL_C_STATUS, LAUNCHER_STATUS_FILE, end_with

SHUTDOWN_S = "600"
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # until torchrun catches it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="slime_like-") as folder:
        left = Path(folder, "status")
        os.environ[LAUNCHER_STATUS_FILE] = str(left)
        try:
            status = _run(argv)
        except KeyboardInterrupt:  # before any rank was started
            print("interrupted", file=sys.stderr, flush=True)
            return CTRL_C_STATUS
        if status and left.exists():
            return int(left.read_text(encoding="ascii"))
        return status


def _run(argv: Sequence[str] | None) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # silence torchrun's repetition of the ranks' errors; each of its loggers has its own level
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    fewest, most = run.parse_min_max_nnodes(run.parse_args(argv).nnodes)
    if fewest < most:
        os.environ[NEW_STORE] = "1"
        _give_ranks_time_to_save()
    try:
        run.main(argv)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except ChildFailedError as failed:
        return _status_of(dict(failed.failures))
    return 0


def _give_ranks_time_to_save() -> None:
    """Extend the 30 seconds after which torchrun kills the ranks that it stops for a rejoining
    node."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    def stop(self: Any, worker_group: object) -> None:
        self._shutdown(timeout=int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))

    LocalElasticAgent._stop_workers = stop  # type: ignore[method-assign]


def _status_of(failures: Mapping[int, Any]) -> int:
    """The exit status: one that a rank chose takes precedence over signals sent by torchrun.

    Args:
        failures: by rank, with ``exitcode`` (below 0: the signal that ended it) and ``pid``.
    """
    chosen = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
    if chosen:
        return int(chosen[0])
    for rank, failure in failures.items():
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} (process {failure.pid}) was ended by {name}", file=sys.stderr)
    return 128 - next(iter(failures.values())).exitcode


if __name__ == "__main__":
    end_with(main())
