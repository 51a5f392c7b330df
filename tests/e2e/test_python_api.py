"""A run as a function call: the numbers are those of train.py, twice in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.programs import TrainServer, clean_environment, torchrun
from tests.paths import ROOT

PROGRAM = """
import json, sys
import slime_like

settings = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    run = slime_like.train(slime_like.make_config(settings, output_dir=name))
    assert not run.interrupted and len(run.metrics) == settings["num_rollout"]
from slime_like.distributed.failure_report import job

assert job().rank == 0, "the ranks of a run know their job, as those of train.py do"
try:
    slime_like.train(slime_like.make_config(settings, preflight=True))
except ValueError as error:
    print("no run:", error)
try:
    slime_like.train(slime_like.make_config(settings, output_dir=sys.argv[2], label_key="nothing"))
except ValueError as error:
    print("refused:", error)
"""

TWICE = """
import json, sys
import slime_like

settings = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    slime_like.train(slime_like.make_config(settings, output_dir=name, world_size=2))
"""


def settings_of(work: Workspace) -> dict[str, object]:
    return {
        "hf_checkpoint": str(work.model), "prompt_data": str(work.prompts), "label_key": "answer", "apply_chat_template": True,
        "input_key": "messages", "custom_rm_path": f"{work.reward}:letters", "rm_num_workers": 1, "rollout_shuffle": True,
        "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "num_steps_per_rollout": 2, "micro_batch_size": 4,
        "rollout_max_response_len": 8, "lr": 1e-3, "policy_loss_type": "sapo", "no_tensorboard": True, "no_progress": True, "no_plot": True,
    }  # fmt: skip


def test_a_run_is_a_function_call(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    server.train(work.flags(tmp_path / "line"), tmp_path / "log").ok()
    settings = settings_of(work)
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings), *folders],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no run: --preflight" in done.stdout
    assert "refused:" in done.stdout and "nothing" in done.stdout
    expected = same_numbers(rows_of(tmp_path / "line"))
    for folder in folders:
        assert same_numbers(rows_of(Path(folder))) == expected


def test_runs_follow_each_other_under_torchrun(work: Workspace, tmp_path: Path) -> None:
    """Its store has the keys of the first run when the second meets."""
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run(
        [*torchrun(2)[:-1], str(program), json.dumps(settings_of(work)), *folders],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**clean_environment(), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (same_numbers(rows_of(Path(folder))) for folder in folders)
    assert first == second and len(first) == 2
