"""Rewards per second of processor time and of wall time, by kind of reward.

    python benchmarks/bench_rewards.py [--against CHECKOUT] [--workers N] [--kind KIND]
        [--json out.json]

With --against another checkout is measured in turns with this one: the same samples, the ratio of
the costs, and the rewards where they differ. 0.5 is half as expensive here, 1.2 is 20 % more.
Processor time is that of this process, its workers and all that they have started, so that a loaded
machine matters little. Workers are warm. Each number is the best of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_like.types import Sample

ROOT = Path(__file__).resolve().parents[1]
TREE = "BENCH_REWARDS_TREE"  # the checkout that a measuring process imports
sys.path.insert(0, os.environ.get(TREE, str(ROOT)))

_SENTENCE = 'We get "f(x)" = {42}: so it\'s <answer>f(42) = 42</answer>'
# kind: --rm-type, response, metadata or the task whose metadata it is, samples
KINDS: dict[str, tuple[str | None, str, dict[str, Any] | str, int]] = {
    "exact_match": ("exact_match", "The answer is \\boxed{42}", {}, 40000),
    "gsm8k": ("gsm8k", "The answer is \\boxed{42}", {}, 40000),
    "math": ("math", "The answer is \\boxed{42}", {}, 500),
    "task, a number": ("task", "<answer>42</answer>", "chain_sum", 8000),
    "task, a sentence": ("task", _SENTENCE, "chain_sum", 1000),
    "task, a formula": ("task", "<answer>(1 + 2) * 3</answer>", "countdown", 1000),
    "task, a call": ("task", "<answer>f(42)</answer>", "countdown", 1000),
    "task, a program": ("task", "<answer>(40 + 2).expand()</answer>", "countdown", 40),
    "code": (
        "code",
        "print(sum(map(int, input().split())))",
        {"tests": [{"stdin": "1 2", "stdout": "3"}]},
        100,
    ),
    "a function of yours": (None, "The answer is 42", {}, 4000),
}
_FUNCTION = "def score(args, sample):\n    return float(sample.response.endswith(sample.label))\n"
_ROUNDS = 4


def samples_of(kind: str) -> list[Sample]:
    import torch

    from slime_like.types import Sample

    _, response, metadata, count = KINDS[kind]
    if isinstance(metadata, str):
        from reasoning_gym import create_dataset

        options = {"size": 1, "seed": 1}
        entry = create_dataset(metadata, **options)[0]
        metadata = {"task": {"name": metadata, "options": options}, "entry": entry}
    ids = torch.tensor([1])
    ones = torch.ones(1, dtype=torch.bool)
    return [
        Sample(0, i, ids, 1, ones, response=response, label="42", metadata=metadata)
        for i in range(count)
    ]


def measure(kind: str, workers: int) -> dict[str, float | None]:
    """CPU seconds per sample (this process and its workers), wall-clock seconds per sample, and the
    reward."""
    import psutil

    from slime_like.rewards.grader import Grader

    def used() -> float:
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        times = [process.cpu_times() for process in tree]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    samples = samples_of(kind)
    processor = []
    wall = []
    with _arguments(kind) as arguments, Grader(**arguments, rm_num_workers=workers) as grader:
        for _ in range(1 + _ROUNDS):
            start = used()
            began = time.monotonic()
            graded = grader.grade(samples)
            processor.append((used() - start) / len(samples))
            wall.append((time.monotonic() - began) / len(samples))
    # the first round starts the workers
    return {"processor": min(processor[1:]), "wall": min(wall[1:]), "reward": graded[-1].reward}


@contextmanager
def _arguments(kind: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        rm_type = KINDS[kind][0]
        file = Path(folder) / "mine.py"
        file.write_text(_FUNCTION)
        path = f"{file}:score" if rm_type is None else None
        yield {"rm_type": rm_type, "custom_rm_path": path, "rm_timeout_s": 100.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured too")
    parser.add_argument("--workers", type=int, default=1, help="processes that grade")
    parser.add_argument("--turns", type=int, default=2, help="processes for each kind and checkout")
    parser.add_argument("--kind", choices=KINDS, action="append", help="these alone")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.kind[0], args.workers)))
        return
    from benchmarks.bench_common import write_json

    trees = [ROOT, *([args.against] if args.against else [])]
    print(f"{'kind':20}  a processor second  a second   ratios of their costs", flush=True)
    results = {}
    for kind in args.kind or KINDS:
        found: list[list[dict[str, float]]] = [[] for _ in trees]
        for _ in range(args.turns):
            for tree, of_tree in zip(trees, found, strict=True):
                of_tree.append(_in_process(tree, kind, args.workers))
        rewards = [{one["reward"] for one in of_tree} for of_tree in found]
        best = [
            {name: min(one[name] for one in of_tree) for name in ("processor", "wall")}
            for of_tree in found
        ]
        results[kind] = best
        line = f"{kind:20}  {1 / best[0]['processor']:18.0f}  {1 / best[0]['wall']:8.0f}"
        if len(trees) > 1:
            line += "".join(f"  {best[0][n] / best[1][n]:5.2f} {n}" for n in ("processor", "wall"))
            if rewards[0] != rewards[1]:
                line += f"  rewards {rewards[0]}, there {rewards[1]}"
        print(line, flush=True)
    write_json(args.json, results)


def _in_process(tree: Path, kind: str, workers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", "--kind", kind, "--workers", str(workers)]
    environment = {**os.environ, TREE: str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
