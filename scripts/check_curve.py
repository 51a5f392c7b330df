"""Say how a metric moved over a run, and fail (exit status 1) when it did not move as asked.

python scripts/check_curve.py outputs/demo/rl/metrics.jsonl --metric eval/heldout/mean
--start-at-most 0.4 --end-at-least 0.8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.metrics.logger import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--metric", required=True)
    parser.add_argument("--start-at-most", type=float, required=True)
    parser.add_argument("--end-at-least", type=float, required=True)
    options = parser.parse_args()
    values = [row[options.metric] for row in read_metrics(options.metrics) if options.metric in row]
    if len(values) < 2:
        print(
            f"{options.metrics}: {options.metric} was logged {len(values)} times; two values are "
            "needed",
            file=sys.stderr,
        )
        return 1
    holds = values[0] <= options.start_at_most and values[-1] >= options.end_at_least
    wanted = f"(wanted: at most {options.start_at_most:g} to at least {options.end_at_least:g})"
    print(
        f"{options.metric}: {values[0]:.3f} -> {values[-1]:.3f} {wanted} "
        f"{'ok' if holds else 'FAILED'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
