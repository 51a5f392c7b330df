"""Memory that a pass frees stays with the process: no page is cleared anew in the next pass."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.paths import ROOT

# ten passes over 32 tensors of 1 MiB, all freed at the end of each; the first one is not counted
PASSES = """
import resource, sys
import torch
from slime_like.trainer.launch import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
def one_pass():
    held = [torch.ones(1 << 18) for _ in range(32)]
one_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    one_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of(mode: str, **environment: str) -> int:
    """Page faults of ten passes."""
    names = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PASSES, mode],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**names, **environment},
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again() -> None:
    given_back = faults_of("plain", MALLOC_TRIM_THRESHOLD_="131072")
    assert faults_of("keep") < given_back / 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_the_environment_decides() -> None:
    left = faults_of("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert left > 10 * 32 * 100  # 256 pages of each MiB are cleared in every pass
