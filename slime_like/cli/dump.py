"""slime-like dump RUN_DIR: show what every rank of a run is doing now. Prints the stack of the main
thread, once for all ranks at the same place; the stacks of all threads are appended to
RUN_DIR/stacks/rank<N>.txt, which the report shows. The run continues.

This works even inside a collective. Run it on each host for the ranks there.

Exit status: 0 all ranks of this host responded, 1 some did not, 2 no run is active.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from slime_like.distributed.stacks import FOLDER, RankProcess, read_rank, request_stacks

LIMIT_S = 5.0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="slime-like dump",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", type=Path, metavar="RUN_DIR", help="--output-dir of the run")
    result.add_argument(
        "--timeout-s", type=float, default=LIMIT_S, help=f"for a rank's answer (default {LIMIT_S})"
    )
    return result


def main_thread(text: str) -> str:
    """The stack of the main thread, which faulthandler writes last; innermost call first."""
    return text.strip().split("\n\n")[-1].partition("\n")[2]


def ranges(ranks: list[int]) -> str:
    """``0-3, 5`` of 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def dump(folder: Path, limit_s: float) -> int:
    files = {rank: path for path in folder.glob("*.txt") if (rank := read_rank(path))}
    here = {rank: path for rank, path in files.items() if rank.is_here and rank.is_running}
    elsewhere = [rank for rank in files if not rank.is_here]
    if not here and not elsewhere:
        print(f"error: {folder.parent}: no rank of a run is running here", file=sys.stderr)
        return 2
    places: dict[str, list[int]] = defaultdict(list)
    silent: list[RankProcess] = []
    for rank, path in here.items():
        text = request_stacks(path, rank, limit_s)
        if text is None:
            silent.append(rank)
        else:
            places[main_thread(text)].append(rank.rank)
    for place, ranks in sorted(places.items(), key=lambda item: min(item[1])):
        print(f"{'ranks' if len(ranks) > 1 else 'rank'} {ranges(ranks)}, innermost call first:")
        print(f"{place}\n")
    for rank in silent:
        print(f"rank {rank.rank} (process {rank.process}): no answer in {limit_s:g} s")
    for host in sorted({rank.host for rank in elsewhere}):
        remote = ranges([rank.rank for rank in elsewhere if rank.host == host])
        print(f"ranks {remote} are on {host}: run it there, e.g. with srun --overlap --jobid JOB")
    print(f"all threads: {folder}/rank*.txt")
    return 1 if silent else 0


def main() -> int:
    args = parser().parse_args()
    return dump(args.run / FOLDER, args.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
