"""Runs that learn from pairs of answers, as a user starts them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import WORDS, Workspace, rows_of
from tests.e2e.programs import TrainServer

PAIRS: dict[str, Any] = {
    "policy_loss_type": None, "n_samples_per_prompt": None, "label_key": None, "custom_rm_path": None, "rm_num_workers": None,
    "rollout_max_response_len": None, "input_key": "prompt", "num_steps_per_rollout": None, "micro_batch_size": None, "rollout_batch_size": 15,
}  # fmt: skip


def pair_file(folder: Path) -> Path:
    """A word spelled backward is preferred to the word."""
    path = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"spell {word} backward", "chosen": word[::-1], "rejected": word}
        for word in WORDS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.extended
def test_dpo_prefers_the_chosen_answers(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From the loss log 2 of a policy that is its reference, on two ranks."""
    flags = {**PAIRS, "loss_type": "dpo_loss", "prompt_data": pair_file(tmp_path), "ref_load": work.model, "num_rollout": 6, "lr": 3e-3}  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log", ranks=2).ok()
    rows = rows_of(tmp_path / "out")
    assert abs(rows[0]["train/loss"] - math.log(2)) < 1e-4 and abs(rows[0]["train/kl"]) < 1e-6
    assert rows[-1]["train/pair_accuracy"] > 0.9 and rows[-1]["train/loss"] < 0.5
    assert rows[-1]["train/pair_margin"] > 0.5
    assert rows[-1]["train/chosen_reward"] > rows[-1]["train/rejected_reward"]
