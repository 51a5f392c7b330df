"""Faults that were planted by hand (planted.py) can be planted again."""

from __future__ import annotations

import pytest

from tests.pretend_gpu.build import ROOT
from tests.pretend_gpu.planted import FAULTS, SETTINGS, Fault
from tests.pretend_gpu.waits_budget import CELLS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_still_has_its_place(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new not in (ROOT / fault.file).read_text() or not fault.new
    assert fault.setting in SETTINGS or fault.waits in CELLS
