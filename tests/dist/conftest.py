"""Fixtures shared by the tests of one process and of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[Any]:
    """The layout of a process group of one."""
    from benchmarks.parity.steps import (
        parallel,
    )  # only once a test's own module has applied the patches

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with parallel() as layout:
            yield layout
    finally:
        dist.destroy_process_group()


@pytest.fixture
def float64() -> Iterator[None]:
    """What this process computes in a test is in float64."""
    from tests.dist.float64 import WithoutFloat32

    with WithoutFloat32():
        yield
