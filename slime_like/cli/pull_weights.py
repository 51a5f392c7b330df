"""Keep a local copy of the weights up to date on a node that has servers but no trainer ranks.

    slime-like pull-weights /shared/updates /local/checkpoint --engines http://10.0.0.7:30000

For a trainer with --update-weight-mode delta and --update-weight-disk-dir /shared/updates. Every
weight delta is applied to the local copy, which the trainer then has the servers load. Servers may
start from the local copy or from any other folder of the model. Ends with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Keep a local copy of the weights up to date on a node that has servers but no "
        "trainer ranks."
    )
    result.add_argument(
        "source", help="the trainer's --update-weight-disk-dir, as mounted on this node"
    )
    result.add_argument("folder", help="folder of the local copy, on a disk of this node")
    result.add_argument(
        "--engines", nargs="+", required=True, metavar="URL",
        help="URLs of the servers on this node, with http://, as the trainer names them",
    )  # fmt: skip
    return result


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = parser().parse_args()
    from slime_like.weights.delta_follow import follow
    from slime_like.weights.delta_local import LocalCheckpoint

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follow(LocalCheckpoint(args.source, args.folder), args.engines, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
