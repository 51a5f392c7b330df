"""Packing sequences into micro-batches under a token budget: utilisation, and cost on the host.

    python benchmarks/bench_packing.py [--json packing.json]

For 512 sequences of one rank and budgets of 16k tokens: the rows that
`slime_like.distributed.seqlen_balancing.pack_by_budget` makes, the least that could hold the
tokens, their fullest and emptiest once `even_rows` has levelled them, and what rows of a fixed
number of sequences would do: their number, the largest row, and the share of padding if each
sequence were padded to the longest of its row. Below: the time as sequences grow.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import LENGTHS, fastest, growth_exponent, write_json  # noqa: E402
from slime_like.distributed.seqlen_balancing import even_rows, pack_by_budget  # noqa: E402

BUDGET = 16384
GROWTH = (512, 1024, 2048, 4096, 8192, 16384)
Lengths = NDArray[np.int64]


def packed(lengths: Lengths, repeats: int) -> dict[str, float]:
    seconds, rows = fastest(
        lambda: pack_by_budget(lengths, BUDGET), repeats=repeats, clock=time.process_time
    )
    level_seconds, level = fastest(
        lambda: even_rows(lengths, len(rows), BUDGET), repeats=repeats, clock=time.process_time
    )
    tokens = [int(lengths[row].sum()) for row in level]
    assert (
        sorted(np.concatenate(level).tolist()) == list(range(lengths.size))
        and max(tokens) <= BUDGET
    )
    return {
        "rows": len(rows), "bound": -(-int(lengths.sum()) // BUDGET), "fullest": max(tokens),
        "emptiest": min(tokens), "pack_ms": 1e3 * seconds,
        "level_ms": 1e3 * level_seconds,
    }  # fmt: skip


def by_number(lengths: Lengths, size: int) -> dict[str, float]:
    """Pack `size` consecutive sequences per row, so that the mean row length is the budget."""
    rows = np.array_split(lengths, -(-lengths.size // size))
    padded = sum(int(row.max()) * row.size for row in rows)
    return {
        "rows": len(rows),
        "largest": max(int(row.sum()) for row in rows),
        "padding_frac": 1 - float(lengths.sum()) / padded,
    }


def table(repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(
        f"{'lengths':10} {'rows':>5} {'bound':>6} {'fullest':>8} {'emptiest':>9} {'pack ms':>8} "
        f"{'level ms':>9}    by number: rows, largest, padding"
    )
    for name, make in LENGTHS.items():
        lengths = make(512)
        found = packed(lengths, repeats)
        fixed = by_number(lengths, max(1, int(BUDGET / lengths.mean())))
        rows.append({"lengths": name, "packed": found, "by_number": fixed})
        print(
            f"{name:10} {found['rows']:5} {found['bound']:6} {found['fullest']:8} "
            f"{found['emptiest']:9} {found['pack_ms']:8.2f} {found['level_ms']:9.2f}    "
            f"{fixed['rows']:15} {fixed['largest']:8} {fixed['padding_frac']:8.1%}"
        )
    return rows


def growth(repeats: int) -> list[dict[str, float]]:
    """Time of packing and balancing over the number of sequences."""
    rows = []
    print(
        f"\n{'sequences':>10} {'rows':>6} {'bound':>6} {'pack ms':>8} {'level ms':>9} "
        f"{'us a sequence':>14}   (bimodal)"
    )
    for count in GROWTH:
        found = packed(LENGTHS["bimodal"](count), repeats)
        ms = found["pack_ms"] + found["level_ms"]
        rows.append({"sequences": count, **found, "ms": ms})
        print(
            f"{count:10} {found['rows']:6} {found['bound']:6} {found['pack_ms']:8.2f} "
            f"{found['level_ms']:9.2f} {1e3 * ms / count:14.2f}"
        )
    print(
        "the time grows with the number of sequences to the power of "
        f"{growth_exponent(GROWTH, [row['ms'] for row in rows]):.2f}"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    write_json(
        options.json,
        {"budget": BUDGET, "table": table(options.repeats), "growth": growth(options.repeats)},
    )


if __name__ == "__main__":
    main()
