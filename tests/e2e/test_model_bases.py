"""Whole runs on megatron-core's GPTModel and on its HybridModel (--model-base): the same numbers, and
each continues the other's checkpoints, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.model_base import known_model_bases
from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_resume_layouts import PPO

pytestmark = pytest.mark.skipif(
    "hybrid" not in known_model_bases(), reason="this megatron-core has no HybridModel"
)
SCHEDULE: dict[str, Any] = {"lr_decay_style": "linear", "lr_decay_iters": 14, "weight_decay": 0.1}
KL = {"use_kl_loss": "", "kl_loss_coef": 0.1}
# name -> (flags, processes)
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "critic": (PPO, 1),
    "adapters": ({"lora_rank": 4}, 1),
    "two stages": (
        {"freeze_params_name_list": "embedding", "pipeline_model_parallel_size": 2},
        2,
    ),
    "experts": ({"micro_batch_size": 1, "expert_model_parallel_size": 2}, 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_continues_the_others_checkpoints(
    server: TrainServer, work: Workspace, tmp_path: Path, name: str
) -> None:
    """Layers that are all alike, one tensor in a checkpoint; and dense layers among experts."""
    own, ranks = RUNS[name]
    model = work.expert_model if name == "experts" else work.model
    kl = {} if name == "critic" else {**KL, "ref_load": model}

    def train(folder: str, base: str, rollouts: int, **changes: Any) -> Path:
        out = tmp_path / folder
        kept = {"save_hf": out / "hf", "num_rollout": rollouts, "model_base": base}
        flags = work.flags(out, **{"hf_checkpoint": model, **SCHEDULE, **kl, **own, **kept})
        flags += [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]
        server.train(flags, tmp_path / f"log_{folder}", ranks=ranks).ok()
        return out

    whole = train("whole", "hybrid", 3)
    kept = {"save": tmp_path / "checkpoints", "load": tmp_path / "checkpoints"}
    parts = [
        train(f"part_{n}", base, n, **kept)
        for n, base in enumerate(("gpt", "hybrid", "gpt"), start=1)
    ]
    numbers = same_numbers(rows_of(whole))
    assert [row["step"] for row in numbers] == [1, 2, 3]
    assert [row for part in parts for row in same_numbers(rows_of(part))] == numbers
    expected, ended = weights_of(whole / "hf"), weights_of(parts[-1] / "hf")
    assert [n for n in expected if not torch.equal(expected[n], ended[n])] == []
