"""--true-on-policy-mode through train.py: what is sampled is what the trainer computes, bit for bit,
and one bit of difference ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

MODE: dict[str, Any] = dict(true_on_policy_mode="", micro_batch_size=None)
DIFFERENCE = "rollout/train_rollout_log_prob_diff_max"
# the engine's log-prob of one token is the next float32
SPOIL = """
import math
import torch

def spoil(args, sample, *, rollout_id=None, evaluation=False):
    if rollout_id == 1 and sample.index == 18:
        value = torch.tensor(sample.rollout_log_probs[2])
        sample.rollout_log_probs[2] = float(torch.nextafter(value, torch.tensor(-math.inf)))
    return sample
"""


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, dict(bf16="", rollout_max_response_len=64, num_steps_per_rollout=1)),
        (2, dict(use_distributed_optimizer="")),
        (1, dict(rollout_temperature=0.7, lora_rank=4)),
    ],
    ids=["bf16", "two ranks", "adapter"],
)
def test_every_log_prob_is_the_trainers(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int, flags: dict[str, Any]
) -> None:
    words = work.flags(tmp_path, **{**MODE, **flags})
    server.train(words, tmp_path / "log", ranks=ranks).ok()
    rows = rows_of(tmp_path)
    assert [row[DIFFERENCE] for row in rows] == [0.0, 0.0]
    # without vector instructions a draft's sums have the order of the whole sequence's
    if "bf16" in flags and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert sum(row["rollout/true_on_policy_redrafts"] for row in rows) > 0


def test_experts(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    words = work.flags(tmp_path, **MODE, hf_checkpoint=work.expert_model)
    server.train(words, tmp_path / "log").ok()
    assert [row[DIFFERENCE] for row in rows_of(tmp_path)] == [0.0, 0.0]


def test_without_the_mode_they_differ(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    server.train(work.flags(tmp_path, micro_batch_size=1), tmp_path / "log").ok()
    assert all(0 < row[DIFFERENCE] < 1e-5 for row in rows_of(tmp_path))


def test_one_bit_ends_the_run_and_the_checkpoint_before_stays(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "spoil.py").write_text(SPOIL)
    flags = dict(save=tmp_path / "saved", save_interval=1, **MODE)
    words = work.flags(tmp_path, rollout_sample_hook_path=f"{tmp_path / 'spoil.py'}:spoil", **flags)
    done = server.train(words, tmp_path / "log")
    message = "--true-on-policy-mode: the log-prob of token 2 of the response of sample 18 is -"
    assert done.status == 1 and message in done.error()
    assert "with weight version 2; log-probs that differ: 1" in done.error()
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    # what was saved before goes on without the fault
    server.train(work.flags(tmp_path, load=tmp_path / "saved", **flags), tmp_path / "log2").ok()
    assert [row[DIFFERENCE] for row in rows_of(tmp_path)] == [0.0, 0.0]
