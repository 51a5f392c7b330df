"""train.py with token budgets: the run of one process with micro-batches of a fixed size, on two
ranks, and supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

pytestmark = pytest.mark.extended

SAME = (
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "rollout/reward_mean",
    "rollout/train_rollout_log_prob_diff_mean",
)
# 12 samples in two steps of 6, which 2 ranks x 4 would not divide
SIZES: dict[str, Any] = {
    "rollout_batch_size": 3,
    "micro_batch_size": None,
    "use_dynamic_batch_size": "",
    "max_tokens_per_gpu": 64,
}


def test_two_ranks_balanced_by_work(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "num_rollout": 2,
        "loss_reduction": "token_mean",
        "use_tis": "",
        "rollout_batch_size": 3,
    }
    server.train(
        work.flags(tmp_path / "fixed", **(flags | {"micro_batch_size": 1})), tmp_path / "one.log"
    ).ok()
    server.train(
        work.flags(tmp_path / "budget", **(flags | SIZES)), tmp_path / "two.log", ranks=2
    ).ok()
    fixed, budget = rows_of(tmp_path / "fixed"), rows_of(tmp_path / "budget")
    for a, b in zip(fixed, budget, strict=True):
        for name in SAME:
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name
        assert b["perf/micro_batches"] < a["perf/micro_batches"] == 6
        assert 0 < b["perf/token_budget_used"] <= 1 and b["perf/balance_s"] > 0
        assert 1 <= b["perf/rank_work_max_over_mean"] < 1.2


def test_supervised_fine_tuning(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "loss_type": "sft_loss", "policy_loss_type": None, "n_samples_per_prompt": None, "custom_rm_path": None, "rm_num_workers": None,
        "rollout_batch_size": 8, "rollout_max_response_len": 3,
    }  # fmt: skip
    done = server.train(work.flags(tmp_path / "fixed", **flags), tmp_path / "one.log").ok()
    server.train(
        work.flags(tmp_path / "budget", **(flags | SIZES | {"rollout_batch_size": 8})),
        tmp_path / "two.log",
    ).ok()
    for a, b in zip(rows_of(tmp_path / "fixed"), rows_of(tmp_path / "budget"), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-4)
        assert b["perf/padding_frac"] == 0
        assert b["rollout/truncated_frac"] == a["rollout/truncated_frac"] > 0
    words = (
        "of the answers of this step are longer than --rollout-max-response-len 3 and are truncated"
    )
    assert (done.out + done.err).count(words) == 1
