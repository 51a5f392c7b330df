"""--ref-offload through train.py: a reference model that borrows the policy's place gives the numbers
of a resident one, and the policy is
as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import (
    SAME_RUN,
    Workspace,
    rows_of,
    same_numbers,
    save_other_model,
    weights_of,
)
from tests.e2e.programs import TrainServer

LAYOUTS = {
    "one": (1, ""),
    "distributed optimizer, late gather": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2 bf16": (2, "--pipeline-model-parallel-size 2 --bf16 --max-train-rollout-diff 1"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the policy's shape with other weights."""
    return save_other_model(tmp_path_factory.mktemp("reference"), seed=5, std=0.05)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow
            if "P2" in name
            else ()
            if name == "one"
            else pytest.mark.extended,
        )
        for name in LAYOUTS
    ],
)
def test_the_numbers_are_those_of_a_resident_reference(
    server: TrainServer, work: Workspace, reference: Path, tmp_path: Path, layout: str
) -> None:
    ranks, words = LAYOUTS[layout]
    seen: dict[str, Any] = {}
    for where in ("resident", "offloaded"):
        out = tmp_path / where
        flags = work.flags(
            out,
            num_rollout=2,
            ref_load=reference,
            use_kl_loss="",
            kl_loss_coef=0.1,
            save_hf=out / "hf",
        )
        offload = ["--ref-offload"] if where == "offloaded" else []
        server.train(
            [*flags, *words.split(), *offload], tmp_path / f"log-{where}", ranks=ranks
        ).ok()
        seen[where] = rows_of(out)
    kl = [[row["train/kl"] for row in seen[where]] for where in ("resident", "offloaded")]
    assert kl[0][0] > 1e-4, "the reference is another model than the policy"
    if (
        "P2" in layout
    ):  # matrix products of these sizes depend on where in memory their operands lie
        for resident, offloaded in zip(seen["resident"], seen["offloaded"], strict=True):
            for name in (*SAME_RUN, "train/kl"):
                assert offloaded[name] == pytest.approx(resident[name], rel=1e-4, abs=1e-6), name
        return
    assert kl[0] == kl[1] and same_numbers(seen["offloaded"]) == same_numbers(seen["resident"])
    weights = [weights_of(tmp_path / where / "hf") for where in ("resident", "offloaded")]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
