"""A process that forks for each answer: settled once, forked cheaply."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os
from slime_like.rewards import lean_fork
kept = [bytes(2000) for _ in range(20000)]  # 40 MB
before = sum(map(len, kept))
lean_fork.settle(lean_fork.map_of_memory())
assert gc.get_freeze_count() > 1000
assert sum(map(len, kept)) == before and all(part == bytes(2000) for part in kept)
own = list(lean_fork._own_memory(open("/proc/self/maps").read()))
place = id(kept[10000])
assert any(start <= place < end for start, end in own), "objects lie in what is collapsed"
child = os.fork()
if child == 0:
    kept[0] = b"x"
    os._exit(len(kept) % 7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20000 % 7 and len(kept[0]) == 2000
huge = [line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHuge")]
print(int(huge[0]) // 1024)
"""


def test_settling_changes_no_object_and_uses_huge_pages_where_there_are_some() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    huge = int(done.stdout)
    assert huge == 0 or huge > 20  # megabytes; a kernel before 6.1 has none


WORKER = """
import torch
from slime_like.rewards import lean_fork
from slime_like.rewards.grader import Grader
from slime_like.types import Sample
import reasoning_gym, psutil
options = {"size": 1, "seed": 1}
entry = reasoning_gym.create_dataset("countdown", **options)[0]
metadata = {"task": {"name": "countdown", "options": options}, "entry": entry}
ids, ones = torch.tensor([1]), torch.ones(1, dtype=torch.bool)
sample = Sample(0, 0, ids, 1, ones, response="1", label="1", metadata=metadata)
with Grader(rm_type="task", rm_num_workers=1, rm_timeout_s=60) as grader:
    grader.grade([sample])
    worker = grader._pool.workers[0].process.pid
    try:
        lines = open(f"/proc/{worker}/smaps_rollup").read().splitlines()
    except PermissionError:  # the worker is not this user's to look at
        lines = ["AnonHugePages: -1024 kB"]
lean_fork.settle(lean_fork.map_of_memory())
own = open("/proc/self/smaps_rollup").read().splitlines()
huge = [line for line in (*lines, *own) if line.startswith("AnonHuge")]
found = [int(line.split()[1]) // 1024 for line in huge]
print(*found)
"""


def test_a_worker_of_tasks_lies_in_huge_pages_where_there_are_some() -> None:
    """It is settled within its namespaces, where it sees no /proc."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=200, check=True
    )
    worker, here = map(int, done.stdout.split())
    assert worker == -1 or (worker > 20) == (here > 20)
