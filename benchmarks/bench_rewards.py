"""Rewards per processor second, by kind of reward.

    python benchmarks/bench_rewards.py [--against CHECKOUT] [--samples N] [--json out.json]

With --against the same measurement runs on another checkout too, and the ratio of processor seconds
(workers included, so that a loaded machine matters little) is printed. Workers are warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = "BENCH_REWARDS_TREE"  # the checkout that a measuring process imports
sys.path.insert(0, os.environ.get(TREE, str(ROOT)))

KINDS = ("exact_match", "gsm8k", "math", "task", "code")


def measure(kind: str, count: int) -> float:
    """Processor seconds for each sample, of this process and the workers."""
    import psutil
    import torch

    from slime_like.rewards.grader import Grader
    from slime_like.types import Sample

    metadata: dict[str, object] = {}
    response, label = "The answer is \\boxed{42}", "42"
    if kind == "code":
        metadata = {"tests": [{"stdin": "1 2", "stdout": "3"}]}
        response = "print(sum(map(int, input().split())))"
    if kind == "task":
        from reasoning_gym import create_dataset

        options = {"size": 1, "seed": 1}
        metadata = {
            "task": {"name": "chain_sum", "options": options},
            "entry": create_dataset("chain_sum", **options)[0],
        }
        response = "<answer>42</answer>"
    ones = torch.ones(1, dtype=torch.bool)
    samples = [
        Sample(0, i, torch.tensor([1]), 1, ones, response=response, label=label, metadata=metadata)
        for i in range(count)
    ]

    def used() -> float:
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        times = [process.cpu_times() for process in tree]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    with Grader(rm_type=kind, rm_num_workers=1, rm_timeout_s=100) as grader:
        grader.grade(samples[:2])
        start = used()
        graded = grader.grade(samples)
        seconds = used() - start
    assert all(s.reward is not None for s in graded)
    return seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured too")
    parser.add_argument("--samples", type=int, default=200, help="of the slow kinds")
    parser.add_argument("--kind", choices=KINDS, help="print this one's seconds per sample alone")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(measure(args.kind, args.samples)))
        return
    from benchmarks.bench_common import write_json

    results = {}
    for kind in KINDS:
        count = args.samples if kind in ("math", "code", "task") else 50 * args.samples
        found = []
        for tree in [ROOT, *([args.against] if args.against else [])]:
            command = [sys.executable, __file__, "--kind", kind, "--samples", str(count)]
            environment = {**os.environ, TREE: str(tree), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            found.append(float(done.stdout.splitlines()[-1]))
        ratio = f"  {found[0] / found[1]:.2f} times the other" if len(found) > 1 else ""
        results[kind] = found
        print(f"{kind:12} {1 / found[0]:9.0f} a processor second{ratio}", flush=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
