"""A checkpoint of one release of megatron-core goes on under another one, and back: the numbers of
a run that was never stopped, to 1e-5.

The other release is in an environment of its own, with a Python of its own: `make newest-env`, or
OTHER_PYTHON=/path/to/python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parity_table import (
    LAYOUTS,
    LIMIT,
    ROOT,
    Layout,
    Result,
    compare,
    make_model,
    make_rollouts,
    run_layout,
)
from megatron_patches.patch import megatron_version

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
DISTRIBUTED = next(layout for layout in LAYOUTS if layout.name == "DP2 distributed optimizer")
VERSION = "from importlib.metadata import version; print(version('megatron-core'))"


@pytest.fixture(scope="module")
def other() -> str:
    """The interpreter of an environment with another release."""
    python = os.environ.get("OTHER_PYTHON", str(ROOT / ".venv-newest" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(f"one environment only: there is no {python}; see make newest-env")
    found = subprocess.run(
        [python, "-c", VERSION], capture_output=True, text=True, check=True
    ).stdout.strip()
    if found == megatron_version():
        pytest.skip(f"{python} has megatron-core {found} too")
    return python


@pytest.mark.parametrize("layout", [LAYOUTS[0], DISTRIBUTED], ids=lambda layout: layout.name)
def test_a_checkpoint_goes_on_under_another_release_and_back(
    layout: Layout, other: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", seed=3)
    make_model(tmp_path / "ref", seed=4)
    make_rollouts(str(tmp_path / "rollout_{rollout_id}"))
    base = run_layout(LAYOUTS[0], tmp_path, [])
    folder = str(tmp_path / "checkpoints")
    parts = [
        run_layout(
            Layout(f"step {step}", layout.ranks, layout.flags),
            tmp_path,
            ["--num-rollout", str(step), "--save", folder, "--load", folder],
            python,
        )
        for step, python in enumerate((sys.executable, other, sys.executable), start=1)
    ]
    whole = Result(
        [loss for part in parts for loss in part.losses],
        [norm for part in parts for norm in part.grad_norms],
        parts[-1].weights,
    )
    row = compare(layout.name, base, whole)
    assert row.holds, f"{row} exceeds {LIMIT:g}"
