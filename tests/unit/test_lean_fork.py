"""A process that forks for each answer: settled once, forked cheaply."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os
from slime_like.rewards import lean_fork
kept = [bytes(2000) for _ in range(20000)]  # 40 MB
before = sum(map(len, kept))
lean_fork.settle()
assert gc.get_freeze_count() > 1000
assert sum(map(len, kept)) == before and all(part == bytes(2000) for part in kept)
own = list(lean_fork._own_memory())
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
