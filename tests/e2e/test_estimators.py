"""Estimators that need more than rewards, through train.py: ReMax's greedy responses, and a KL
coefficient that outlives its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.types import GREEDY_REWARD
from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.programs import TrainServer


def test_remax(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """Every sample knows the reward of the greedy response to its prompt; recorded rollouts train
    to the same numbers without an engine."""
    flags: dict[str, Any] = {"advantage_estimator": "remax", "use_tis": "", "num_rollout": 2}
    recorded = tmp_path / "rollout_{rollout_id}"
    server.train(
        work.flags(tmp_path / "one", save_debug_rollout_data=recorded, **flags),
        tmp_path / "one.log",
    ).ok()
    rows = rows_of(tmp_path / "one")
    assert all(row["train/grad_norm"] > 1e-3 for row in rows)
    groups = load_rollout(str(recorded), 0)
    greedy = [{s.metadata[GREEDY_REWARD] for s in group.samples} for group in groups]
    assert all(len(rewards) == 1 for rewards in greedy), "one for each prompt"
    sampled = {s.reward for group in groups for s in group.samples}
    assert {r for rewards in greedy for r in rewards} - sampled, (
        "the greedy response is not one of the samples"
    )
    again = work.flags(
        tmp_path / "two", debug_train_only="", load_debug_rollout_data=recorded, **flags
    )
    server.train(again, tmp_path / "two.log").ok()
    assert rows_of(tmp_path / "two")[0]["train/loss"] == rows[0]["train/loss"]


def test_recorded_rollouts_without_greedy_rewards_are_refused(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    recorded = tmp_path / "rollout_{rollout_id}"
    server.train(
        work.flags(tmp_path / "one", num_rollout=1, save_debug_rollout_data=recorded),
        tmp_path / "one.log",
    ).ok()
    flags = work.flags(
        tmp_path / "two",
        num_rollout=1,
        advantage_estimator="remax",
        debug_train_only="",
        load_debug_rollout_data=recorded,
    )
    failed = server.train(flags, tmp_path / "two.log")
    assert "greedy_rewards" in failed.error()


PARTS = """
def judge(args, sample):
    parts = {"length": 1e3 * sample.response_length, "digits": sum(c.isdigit() for c in sample.response)}
    return parts | {"first": float(sample.response[:1] == "1")} if sample.index % 5 else parts
"""


@pytest.mark.extended
def test_parts_of_rewards_reach_all_ranks(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """GDPO of a dict of three, one of which some samples do not have, on one rank and on two; other
    weights are another run, and a key that nobody has ends it."""
    reward = tmp_path / "mine.py"
    reward.write_text(PARTS)
    flags: dict[str, Any] = dict(
        advantage_estimator="gdpo", custom_rm_path=f"{reward}:judge", reward_key="digits", num_rollout=2,
        gdpo_reward_keys="digits length first", gdpo_reward_weights="1 0.5 2", max_failed_samples=0,
    )  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "one": {},
        "two": {"micro_batch_size": 2},
        "other": {"gdpo_reward_weights": "1 -0.5 2"},
    }
    rows = {}
    for name, more in changes.items():
        argv = work.flags(tmp_path / name, **flags | more)
        server.train(argv, tmp_path / f"log_{name}", ranks=2 if name == "two" else 1).ok()
        rows[name] = rows_of(tmp_path / name)
    for one, two, other in zip(*rows.values(), strict=True):
        assert one["rollout/reward_mean"] == two["rollout/reward_mean"]
        assert abs(one["train/loss"] - two["train/loss"]) < 1e-5
        assert abs(one["train/grad_norm"] - two["train/grad_norm"]) < 1e-4 * one["train/grad_norm"]
        assert (
            abs(one["train/grad_norm"] - other["train/grad_norm"]) > 1e-2 * one["train/grad_norm"]
        )
    argv = work.flags(tmp_path / "none", **flags | {"gdpo_reward_keys": "digits length last"})
    error = server.train(argv, tmp_path / "log_none", ranks=2).error()
    assert "--gdpo-reward-keys" in error and "under last" in error


OF_TOKENS = """
def judge(args, sample):
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [float(token % 3 == sample.group_index % 3) for token in tokens]
"""


@pytest.mark.extended
@pytest.mark.parametrize("estimator", ["otb", "grpo_token"])
def test_tokens_are_compared_in_any_layout(
    server: TrainServer, work: Workspace, tmp_path: Path, estimator: str
) -> None:
    """otb's energies come from the head, and the groups of both are on all ranks: split vocabulary,
    pipeline, context and data give the run of one rank."""
    reward = tmp_path / "mine.py"
    reward.write_text(OF_TOKENS)
    flags: dict[str, Any] = dict(
        advantage_estimator=estimator, num_rollout=2, kl_coef=0.1, kl_loss_type="k2", ref_load=work.model, rm_type=None,
        custom_rm_path=f"{reward}:judge",
    )  # fmt: skip
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "data": {"micro_batch_size": 2},
        "tensor": {"tensor_model_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "context": {"context_parallel_size": 2},
    }
    rows = {}
    for name, more in layouts.items():
        argv = work.flags(tmp_path / name, **flags | more)
        server.train(argv, tmp_path / f"log_{name}", ranks=1 if name == "one" else 2).ok()
        rows[name] = rows_of(tmp_path / name)
    for name, found in rows.items():
        for row, one in zip(found, rows["one"], strict=True):
            assert abs(row["train/loss"] - one["train/loss"]) < 1e-5, name
            assert (
                abs(row["train/grad_norm"] - one["train/grad_norm"]) < 1e-4 * one["train/grad_norm"]
            )
    plain = work.flags(
        tmp_path / "plain", **flags | {"advantage_estimator": "rloo", "sum_token_rewards": ""}
    )
    server.train(plain, tmp_path / "log_plain").ok()
    other, one = rows_of(tmp_path / "plain")[0], rows["one"][0]
    assert abs(other["train/grad_norm"] - one["train/grad_norm"]) > 1e-2 * one["train/grad_norm"]


@pytest.mark.extended
def test_an_adaptive_kl_coefficient_is_resumed(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    flags: dict[str, Any] = dict(
        advantage_estimator="reinforce_plus_plus", normalize_advantages="", gamma=0.9, ref_load=work.model, kl_coef=0.1, kl_loss_type="k2",
        kl_ctrl_type="adaptive", kl_target=1e-4, kl_horizon=100,
    )  # fmt: skip
    server.train(
        work.flags(tmp_path / "whole", num_rollout=3, **flags), tmp_path / "whole.log"
    ).ok()
    saved: dict[str, Any] = dict(save=tmp_path / "saved", **flags)
    server.train(
        work.flags(tmp_path / "parts", num_rollout=2, **saved), tmp_path / "first.log"
    ).ok()
    server.train(
        work.flags(tmp_path / "parts", num_rollout=3, load=tmp_path / "saved", **saved),
        tmp_path / "second.log",
    ).ok()
    full_run, parts = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    coefficients = [row["rollout/kl_coef"] for row in full_run]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == 3, (
        "a coefficient that stands still would hide a lost state"
    )
    assert [row["rollout/kl_coef"] for row in parts] == coefficients
    assert same_numbers(parts) == same_numbers(full_run)


def test_one_answer_a_prompt_learns_across_rollouts_without_groups(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The reward less the mean of the rollout, with a trust region around the engine's log-probs."""
    argv = work.flags(tmp_path, advantage_estimator="batch_mean", policy_loss_type="dppo_kl", n_samples_per_prompt=1, rollout_batch_size=8,
                      num_rollout=3, micro_batch_size=2, async_rollout="", fully_async="", max_staleness=2, rollout_slice_len=2,
                      save_debug_rollout_data=tmp_path / "r_{rollout_id}")  # fmt: skip
    done = server.train(argv, tmp_path / "log").ok()
    assert "every advantage is 0" not in done.err + done.out
    rows = rows_of(tmp_path)
    assert all(row["train/grad_norm"] > 1e-3 for row in rows)
    for rollout, row in enumerate(rows):
        groups = load_rollout(str(tmp_path / "r_{rollout_id}"), rollout)
        rewards = [s.reward for group in groups for s in group.samples]
        assert len({group.group_id for group in groups}) == 8 and None not in rewards
        assert row["reward/singleton_groups"] == 0
