"""A checkpoint of one release of megatron-core continues under another one, and back: the numbers of
a run that was never stopped, to 1e-5.

The other release is in its own environment, with its own Python: `make newest-env`, or
OTHER_PYTHON=/path/to/python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity_table import (
    LAYOUTS,
    LIMIT,
    ONE_PROCESS,
    ROOT,
    Result,
    compare,
    make_model,
    make_rollouts,
    run_layout,
)
from megatron_patches.patch import megatron_version
from scripts.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
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


def whole_and_in_parts(
    layout: str, other: str, folder: Path, flags: list[str]
) -> tuple[Result, Result]:
    """A run of one process that is never stopped; and one in `layout`, each of whose steps continues
    from the checkpoint of the step before it, the second step under the other release."""
    make_rollouts(str(folder / "rollout_{rollout_id}"))
    base = run_layout(ONE_PROCESS, LAYOUTS[ONE_PROCESS], folder, flags)
    checkpoints = str(folder / "checkpoints")
    parts = [
        run_layout(
            f"step {step}",
            LAYOUTS[layout],
            folder,
            [*flags, "--num-rollout", str(step), "--save", checkpoints, "--load", checkpoints],
            python,
        )
        for step, python in enumerate((sys.executable, other, sys.executable), start=1)
    ]
    return base, Result(
        [loss for part in parts for loss in part.losses],
        [norm for part in parts for norm in part.grad_norms],
        parts[-1].weights,
    )


@pytest.mark.parametrize("layout", [ONE_PROCESS, "DP2 distributed optimizer"])
def test_a_checkpoint_continues_under_another_release_and_back(
    layout: str, other: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", seed=3)
    make_model(tmp_path / "ref", seed=4)
    base, found = whole_and_in_parts(layout, other, tmp_path, [])
    row = compare(layout, base, found)
    assert row.holds, f"{row} exceeds {LIMIT:g}"


@pytest.mark.parametrize(
    ("family", "settings"),
    [("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 1}), ("Qwen3NextForCausalLM", {})],
)
def test_so_do_experts_and_a_layer_of_multi_token_prediction(
    family: str, settings: dict[str, Any], other: str, tmp_path: Path
) -> None:
    """With latent attention, and with gated delta nets, whose tensors have their own names."""
    for name, seed in (("model", 3), ("ref", 4)):
        make_tiny_model(family, tmp_path / name, seed=seed, **settings)
    flags = ["--mtp-num-layers", "1", "--enable-mtp-training"]
    base, found = whole_and_in_parts(ONE_PROCESS, other, tmp_path, flags)
    assert found.losses == pytest.approx(base.losses, rel=LIMIT)
    assert found.grad_norms == pytest.approx(base.grad_norms, rel=LIMIT)
    torch.testing.assert_close(found.weights, base.weights, rtol=LIMIT, atol=1e-7)
