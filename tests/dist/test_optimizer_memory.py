"""Optimizer state in other types and on the CPU, in layouts with experts, pipelines and overlap:
what it trains is what megatron-core's own does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity.models import make_moe_model
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model

PRECISE = "--use-precision-aware-optimizer"
KINDS = {
    "fp32": PRECISE,
    "bf16": f"{PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "on the CPU": f"{PRECISE} --optimizer-cpu-offload --optimizer-offload-fraction 0.6",
}
TP2_PP2 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_train_as_with_megatron_cores_own(tmp_path: Path, ranks: int) -> None:
    """In float32 the same bits; offloaded up to the order of operations in torch's fused kernel; in
    bf16 up to its rounding. One step of the five is skipped, and leaves no trace."""
    make_model(tmp_path / "dense", seed=3)
    make_moe_model(tmp_path / "experts")
    dense, experts = str(tmp_path / "dense"), str(tmp_path / "experts")
    layouts = {
        2: {
            "DP2 overlap": (dense, "--overlap-grad-reduce --overlap-param-gather"),
            "EP2": (experts, "--expert-model-parallel-size 2"),
        },
        4: {"TP2 PP2": (dense, TP2_PP2)},
    }[ranks]
    arguments = {"layouts": layouts, "kinds": KINDS}
    for found in run_ranks(
        "tests.dist.optimizer_worker:compare", ranks, tmp_path / "run", arguments, timeout_s=280
    ):
        for name, (norm, weights) in found.items():
            if "fp32" in name:
                assert norm == weights == 0, (name, norm, weights)
            else:
                assert norm < 0.05 and weights < (5e-3 if "bf16" in name else 2e-3), (
                    name,
                    norm,
                    weights,
                )
