"""The trainer's memory and the servers' in turn: the same run to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.fake_sglang import FakeServer


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.extended)], ids=["one rank", "two ranks"]
)
def test_offload_changes_no_bit(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int
) -> None:
    """With the distributed optimizer, which has views of the weights' buffers, an evaluation between
    rollouts and checkpoints."""
    rows, weights = [], []
    for name, flags in (("plain", {}), ("offloaded", {"offload": ""})):
        out, hf = tmp_path / name, tmp_path / f"{name}_hf"
        with FakeServer(str(work.model)) as fake:
            given = dict(
                rollout_engine="sglang", rollout_external_engine_addrs=fake.address, no_sglang_router="", update_weight_transport="disk",
                n_samples_per_prompt=2, num_rollout=3, micro_batch_size=2, use_distributed_optimizer="", save_hf=hf, eval_interval=2,
                eval_prompt_data=f"few {work.prompts}@[0:4]", save=tmp_path / f"{name}_ck", save_interval=2,
            )  # fmt: skip
            server.train(
                work.flags(out, **given | flags), tmp_path / f"{name}_log", ranks=ranks
            ).ok()
            asked = fake.count("/release_memory_occupation")
            assert (asked > 3) == bool(flags)
            assert fake.count("/resume_memory_occupation") in (asked - 1, asked)
        rows.append(rows_of(out))
        weights.append(load_file(hf / "model.safetensors"))
    plain, offloaded = (
        [{n: v for n, v in row.items() if n.split("/")[0] in ("train", "eval")} for row in each]
        for each in rows
    )
    assert offloaded == plain and len(plain) == 4  # the evaluation before training is the first
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    model = sum(tensor.nbytes for tensor in weights[0].values()) / 1e9
    freed = [row["perf/offloaded_gb"] for row in rows[1] if "perf/offloaded_gb" in row]
    # weights and gradients, then moments too, of which each rank of two has half. Behind a checkpoint
    # storage that numpy has seen stays, on a CPU.
    assert len(freed) == 3 and freed[0] > 1.9 * model and freed[1] >= freed[0] + 1.9 * model / ranks
