"""Faults planted in an engine are named with their layer and their cause, and so are faults in the
trainer; equal implementations have no findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.parity.steps import parallel
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.unit.certify.planted import FAULTS, Fault
from tests.unit.certify.worlds import World, make_world


class Worlds:
    """A world of each family, made when it is first asked for."""

    def __init__(self, folder: Path, layout: ParallelLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._made: dict[str, World] = {}

    def __getitem__(self, family: str) -> World:
        if family not in self._made:
            folder = self._folder / family
            self._made[family] = make_world(family, folder, "", layout=self._layout)
        return self._made[family]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with parallel() as layout:
        yield Worlds(tmp_path_factory.mktemp("certify"), layout)
    dist.destroy_process_group()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault: Fault, worlds: Worlds) -> None:
    found = worlds[fault.family].examine_engine(fault.plant).findings
    assert found, "nothing was found"
    first = found[0]
    where = (first.cause, first.site, first.expert)
    assert where == (fault.cause, fault.site, fault.expert), first.text
    assert fault.says in first.evidence, first.text
    assert len(found) == 1 or fault.name in ("layers swapped",), [f.text for f in found]
