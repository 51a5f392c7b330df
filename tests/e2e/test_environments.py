"""Whole runs with functions that make responses, rewards of groups, and evaluation sets with
settings of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.programs import TrainServer

pytestmark = pytest.mark.extended
GROUP_REWARD = """
def by_length(args, samples):
    order = sorted(samples, key=lambda s: (s.response_length, s.index))
    return [order.index(s) / len(samples) for s in samples]
"""


def test_the_game_over_a_reasoning_gym_task(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Several turns, feedback between them that is not trained on; the trainer's log-probs equal
    the sampler's where the model wrote."""
    flags = dict(prompt_data="reasoning_gym:chain_sum?size=20&min_digits=1&max_digits=1", custom_rm_path=None, label_key=None, input_key=None,
                 custom_generate_function_path="examples/guessing_game/game.py:generate", rollout_max_response_len=90,
                 save_debug_rollout_data=tmp_path / "r_{rollout_id}", n_samples_per_prompt=2)  # fmt: skip
    server.train(work.flags(tmp_path / "one", **flags), tmp_path / "log").ok()
    samples = [s for g in load_rollout(str(tmp_path / "r_{rollout_id}"), 0) for s in g.samples]
    assert max(s.metadata["turns"] for s in samples) == 4
    for sample in samples:
        assert (
            0 < int(sample.loss_mask.sum()) < sample.response_length
            or sample.metadata["turns"] == 1
        )
        assert sample.rollout_log_probs is not None
        assert (
            sample.rollout_log_probs[sample.loss_mask] < 0
        ).all() and not sample.rollout_log_probs[~sample.loss_mask].any()
        assert {v for v, m in zip(sample.weight_versions, sample.loss_mask.tolist()) if m} == {1}
    rows = rows_of(tmp_path / "one")
    assert 0 < max(row["rollout/train_rollout_log_prob_diff_max"] for row in rows) < 1e-4
    assert all(row["rollout/failed_frac"] == 0 and row["train/grad_norm"] >= 0 for row in rows)


def test_the_calculator_with_rewards_of_groups(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Two ranks train as one does, group rewards included; evaluation sets have their own sampling
    and reward."""
    (tmp_path / "by.py").write_text(GROUP_REWARD)
    (tmp_path / "eval.yaml").write_text(
        "defaults: {max_response_len: 4}\n"
        "datasets:\n"
        f"  - {{name: greedy, path: '{work.prompts}@[0:4]', temperature: 0, n_samples_per_eval_prompt: 2, custom_rm_path: '{work.reward}:letters'}}\n"
        f"  - {{name: hot, path: '{work.prompts}@[0:3]', temperature: 2.0, max_response_len: 12, rm_type: exact_match, n_samples_per_eval_prompt: 4}}\n"
    )
    flags = dict(custom_generate_function_path="examples/calculator/calculator.py:generate", custom_rm_path=f"{tmp_path / 'by.py'}:by_length",
                 group_rm="", eval_interval=2, eval_config=tmp_path / "eval.yaml", skip_eval_before_train="")  # fmt: skip
    server.train(work.flags(tmp_path / "one", **flags), tmp_path / "log").ok()
    rows = rows_of(tmp_path / "one")
    assert all(row["rollout/reward_mean"] == 0.375 for row in rows), "the mean of 0, 1/4, 2/4, 3/4"
    last = rows[-1]
    assert (
        last["eval/greedy/response_length_mean"] <= 4
        and last["eval/greedy/pass@2"] >= 0
        and "eval/greedy/pass@4" not in last
    )
    assert 0.04 <= last["eval/greedy/mean"] <= 0.6, "letters, not the group's reward"
    assert (
        last["eval/hot/mean"] == 0
        and last["eval/hot/response_length_mean"] > 4
        and last["eval/hot/pass@4"] == 0
    )
    server.train(
        work.flags(tmp_path / "two", **flags, micro_batch_size=2), tmp_path / "log2", ranks=2
    ).ok()
    assert [row["rollout/reward_mean"] for row in rows_of(tmp_path / "two")] == [0.375] * 2
    for ours, theirs in zip(
        same_numbers(rows), same_numbers(rows_of(tmp_path / "two")), strict=True
    ):
        assert (
            abs(ours["train/loss"] - theirs["train/loss"]) < 1e-5
            and ours["rollout/response_length_mean"] == theirs["rollout/response_length_mean"]
        )
