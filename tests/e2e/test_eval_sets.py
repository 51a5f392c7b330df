"""Standard evaluation sets in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_like.rewards import sandbox
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.unit.standard_sets.test_sets import HUMAN_EVAL


@pytest.mark.skipif(sandbox.problem() is not None, reason="the host has no sandbox")
def test_a_run_evaluates_sets_by_name(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(HUMAN_EVAL) + "\n")
    given = f"gsm8k={tmp_path}/gsm8k humaneval={tmp_path}/HumanEval.jsonl"
    argv = work.flags(
        tmp_path / "out", num_rollout=1, eval_interval=1, eval_sets=given,
        n_samples_per_eval_prompt=2, eval_max_response_len=8,
        eval_prompt_data=f"own {work.prompts}@[0:2]", save_debug_rollout_data=None,
    )  # fmt: skip
    server.train(argv, tmp_path / "log").ok()
    for row in (row for row in rows_of(tmp_path / "out") if "eval/own/mean" in row):
        for name in ("gsm8k", "humaneval"):
            assert 0 <= row[f"eval/{name}/mean"] <= row[f"eval/{name}/pass@2"] <= 1
            assert row[f"eval/{name}/unscored_frac"] == 0
        break
    else:
        raise AssertionError("the run was not evaluated")
