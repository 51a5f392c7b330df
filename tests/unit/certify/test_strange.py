"""Faults that certify's author never saw are named with layer, part and cause, at random places;
tests/dist/test_certify.py has the clean runs in layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.steps import parallel
from slime_like.certify.compare import Examination
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.unit.certify.strange import (
    ENGINE_FAULTS,
    HALF_AN_ADAPTER,
    LAYERS,
    TRAINER_FAULTS,
    Stranger,
    adapter_update,
    name_of,
)
from tests.unit.certify.worlds import World, make_world

pytestmark = pytest.mark.slow


class Worlds:
    """A world of each family with these changes of config.json, made when it is first asked for."""

    def __init__(self, folder: Path, layout: ParallelLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._made: dict[str, World] = {}

    def of(self, fault: Stranger) -> World:
        key = f"{fault.family} {sorted(fault.changes)}"
        if key not in self._made:
            self._made[key] = self.new(fault.family, fault.changes)
        return self._made[key]

    def new(self, family: str, changes: Any, seed: int = 1) -> World:
        folder = self._folder / f"{family}-{'-'.join(sorted(changes))}-{seed}"
        sizes = {"num_hidden_layers": LAYERS, **changes}
        return make_world(family, folder, "", layout=self._layout, seed=seed, changes=sizes)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with parallel() as layout:
        yield Worlds(tmp_path_factory.mktemp("strange"), layout)
    dist.destroy_process_group()


def check(fault: Stranger, subject: str, examined: Examination) -> None:
    texts = [finding.text for finding in examined.findings]
    print(f"{fault.name} at {fault.site}:", *texts, sep="\n  ")
    assert texts, "nothing was found"
    first = examined.findings[0]
    assert (first.subject, first.site) == (subject, fault.site), texts
    assert re.search(fault.cause, f"{first.cause}: {first.evidence}"), texts
    if fault.expert:
        assert first.expert == fault.place.expert, texts
    if fault.positions:
        assert first.position == fault.place.position, texts
    if not fault.everywhere:
        assert len(texts) == 1, texts


@pytest.mark.parametrize("fault", ENGINE_FAULTS, ids=lambda fault: fault.name)
def test_a_strange_fault_in_the_engine_is_named(fault: Stranger, worlds: Worlds) -> None:
    world = worlds.of(fault)
    comparison = world.reference._comparison
    if fault.name == HALF_AN_ADAPTER:
        name = name_of(fault.place, "mlp.up_proj.weight")
        merged = world.reference.weights[name]
        comparison._base = {name: merged - adapter_update(merged)}
    try:
        check(fault, "engine", world.examine_engine(lambda model: fault.plant(model, fault.place)))
    finally:
        comparison._base = {}


@pytest.mark.parametrize("fault", TRAINER_FAULTS, ids=lambda fault: fault.name)
def test_a_strange_fault_in_the_trainer_is_named(fault: Stranger, worlds: Worlds) -> None:
    world = worlds.new(fault.family, fault.changes)
    with torch.no_grad():
        fault.plant(world.backend, fault.place)
    check(fault, "trainer", world.examine_trainer())
