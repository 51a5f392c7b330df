"""Keep a node's copy of the weights up to date, for servers on a node without trainer ranks.

    slime-like pull-weights /shared/updates /local/checkpoint --engines http://10.0.0.7:30000

It waits for the trainer of --update-weight-mode delta, which has --update-weight-disk-dir
/shared/updates. Servers may be started from the local folder's model as from any other; the trainer
has them load the local folder when it is at the update. Ends with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Keep a node's copy of the weights that a trainer sends as changes, for the servers on the node."
    )
    result.add_argument("source", help="the trainer's --update-weight-disk-dir, as seen here")
    result.add_argument("folder", help="of the copy, on a disk of this node")
    result.add_argument(
        "--engines", nargs="+", required=True, metavar="URL",
        help="the servers on this node, as the trainer names them, with http://",
    )  # fmt: skip
    return result


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = parser().parse_args()
    from slime_like.weights.delta_follow import follow
    from slime_like.weights.delta_local import LocalCheckpoint

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follow(LocalCheckpoint(words.source, words.folder), words.engines, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
