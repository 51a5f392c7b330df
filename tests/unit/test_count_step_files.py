"""The number of files that a step enters, which docs/architecture.md quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.extended
def test_the_architecture_page_has_the_number() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/count_step_files.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    files = re.findall(r"^ *\d+  (\w+)/(\S+)$", done.stdout, re.MULTILINE)
    packages = Counter(package for package, _ in files)
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"enters (\d+) files of `slime_like/`", page)
    assert packages["slime_like"] == int(quoted) <= 40
    assert packages.keys() <= {"slime_like", "megatron_patches"}
    assert ("slime_like", "trainer/trainer.py") in files
