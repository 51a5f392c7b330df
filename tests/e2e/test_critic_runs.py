"""PPO with a critic through train.py: resuming, what the critic starts from, rollouts for the
critic alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer

PPO: dict[str, Any] = dict(
    advantage_estimator="ppo", policy_loss_type="ppo", normalize_advantages="", lambd=0.95, gamma=0.99, critic_lr=2e-3, value_clip=0.05,
    critic_lr_warmup_iters=1, lr_decay_style="linear", lr_decay_iters=8, weight_decay=0.1,
)  # fmt: skip
CRITIC = (
    "train/value_loss",
    "train/critic_grad_norm",
    "train/critic_lr",
    "train/value_diff_abs",
    "rollout/values_mean",
    "rollout/returns_mean",
)
LAYOUTS = {
    "DP2": ("--use-distributed-optimizer", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
}


def flags(work: Workspace, out: Path, **changes: Any) -> list[str]:
    return work.flags(out, **{**PPO, "save_hf": out / "hf", **changes})


def of_the_critic(out: Path) -> list[dict[str, float]]:
    return [{name: row[name] for name in CRITIC} for row in rows_of(out)]


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """2 rollouts in one go, with a checkpoint after each; `full_run / "checkpoints"`."""
    out = tmp_path_factory.mktemp("ppo")
    recorded = out / "rollout_{rollout_id}"
    argv = flags(
        work,
        out,
        num_rollout=2,
        save=out / "checkpoints",
        save_interval=1,
        save_debug_rollout_data=recorded,
    )
    server.train(argv, out / "log").ok()
    return out


def test_a_run(full_run: Path) -> None:
    first, second = rows_of(full_run)
    assert first["rollout/values_mean"] == 0 == first["rollout/explained_variance"], (
        "a head of zeros"
    )
    assert (
        second["rollout/values_mean"] != 0
        and second["rollout/returns_mean"] != first["rollout/returns_mean"]
    )
    for row in (first, second):
        assert row["train/grad_norm"] > 1e-3 and row["train/critic_grad_norm"] > 1e-3
        assert row["train/value_loss"] > 0 and 0 <= row["train/value_clipfrac"] <= 1
        assert row["perf/values_s"] > 0 and row["perf/train_critic_s"] > 0
        assert row["train/critic_skipped_steps"] == 0
    assert second["train/critic_lr"] == pytest.approx(
        2 * second["train/lr"] * 7 / 8 * 6 / 5, rel=0.2
    ), "both decay; the critic warms up first"


@pytest.mark.extended
def test_one_and_one_are_two(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """Bit by bit: the policy, and all that depends on the critic, its optimizer and its schedule."""
    recorded = tmp_path / "rollout_{rollout_id}"
    argv = flags(
        work,
        tmp_path,
        num_rollout=2,
        load=full_run / "checkpoints",
        ckpt_step=1,
        save=tmp_path / "ck",
        save_debug_rollout_data=recorded,
    )
    server.train(argv, tmp_path / "log").ok()
    assert same_numbers(rows_of(tmp_path)) == same_numbers(rows_of(full_run))[1:]
    assert of_the_critic(tmp_path) == of_the_critic(full_run)[1:]
    assert sampled(recorded, 1) == sampled(full_run / "rollout_{rollout_id}", 1)
    expected, found = weights_of(full_run / "hf"), weights_of(tmp_path / "hf")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    again = flags(work, tmp_path / "third", num_rollout=3, load=tmp_path / "ck")
    server.train(again, tmp_path / "log3").ok()
    other = flags(work, tmp_path / "other", num_rollout=3, load=full_run / "checkpoints")
    server.train(other, tmp_path / "log4").ok()
    assert of_the_critic(tmp_path / "third") == of_the_critic(tmp_path / "other"), (
        "the critic that was saved after resuming is the same too"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_and_one_are_two_on_two_processes(
    server: TrainServer, work: Workspace, tmp_path: Path, layout: str
) -> None:
    words, ranks = LAYOUTS[layout]
    one, two, root = tmp_path / "one", tmp_path / "two", tmp_path / "checkpoints"
    server.train(
        [*flags(work, one, num_rollout=2), *words.split()], tmp_path / "log1", ranks=ranks
    ).ok()
    server.train(
        [*flags(work, two, num_rollout=1, save=root), *words.split()],
        tmp_path / "log2",
        ranks=ranks,
    ).ok()
    server.train(
        [*flags(work, two, num_rollout=2, load=root), *words.split()],
        tmp_path / "log3",
        ranks=ranks,
    ).ok()
    assert same_numbers(rows_of(two)) == same_numbers(rows_of(one)) and of_the_critic(
        two
    ) == of_the_critic(one)


@pytest.mark.extended
def test_rollouts_for_the_critic_alone(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The policy, its optimizer and the engine stay as they are, bit by bit, and the critic learns."""
    recorded = tmp_path / "rollout_{rollout_id}"
    alone = flags(
        work,
        tmp_path / "alone",
        num_rollout=2,
        num_critic_only_steps=2,
        save_debug_rollout_data=recorded,
    )
    server.train(alone, tmp_path / "log1").ok()
    before, after = weights_of(work.model), weights_of(tmp_path / "alone" / "hf")
    assert all(torch.equal(before[name], after[name]) for name in after)
    rows = rows_of(tmp_path / "alone")
    assert all("train/loss" not in row and "train/lr" not in row for row in rows)
    assert rows[1]["rollout/values_mean"] != 0 and "perf/sync_s" not in rows[1], (
        "nothing to hand to the engine"
    )
    then = flags(
        work,
        tmp_path / "then",
        num_rollout=2,
        num_critic_only_steps=1,
        save_debug_rollout_data=tmp_path / "then_{rollout_id}",
    )
    server.train(then, tmp_path / "log2").ok()
    assert sampled(tmp_path / "then_{rollout_id}", 1) == sampled(recorded, 1), (
        "the engine still samples from the first policy"
    )
    first, second = rows_of(tmp_path / "then")
    assert "train/loss" not in first and second["train/grad_norm"] > 1e-3
    moved = weights_of(tmp_path / "then" / "hf")
    assert any(not torch.equal(before[name], moved[name]) for name in moved)


def test_two_steps_of_the_critic_with_frozen_attention(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """As in SAO (arXiv 2607.07508): twice as many optimizer steps over the same rollout, whose
    schedule is as long as the policy's; the attention of the checkpoint is the model's. A run in
    two parts ends as one in one, bit by bit."""
    sao = dict(critic_steps_per_policy_step=2, critic_freeze_params_name_list="self_attention")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    root = tmp_path / "checkpoints"
    server.train(
        flags(work, whole, **sao, num_rollout=2, save=whole / "ck"), tmp_path / "log1"
    ).ok()
    for rollouts in (1, 2):
        out = parts if rollouts == 2 else tmp_path / "first"
        argv = flags(work, out, **sao, num_rollout=rollouts, save=root, load=root)
        server.train(argv, tmp_path / f"part{rollouts}").ok()
    first, second = rows_of(whole)
    assert same_numbers(rows_of(parts)) == same_numbers([second])
    assert of_the_critic(parts) == of_the_critic(whole)[1:]
    # 2 policy steps a rollout, and a linear decay over 8 of them: 16 of the critic's, of which the
    # first warms up and the last of rollout r is number 4 r
    assert first["train/critic_lr"] == pytest.approx(2e-3 * (1 - (3 - 1) / (16 - 1)))
    assert second["train/critic_lr"] == pytest.approx(2e-3 * (1 - (7 - 1) / (16 - 1)))
    saved = tmp_path / "hf"
    words = ("--load", whole / "ck", "--hf-checkpoint", work.model, "--output", saved)
    more = ("--network", "critic", "--no-progress")
    server.run("slime_like.cli.convert_megatron_to_hf", (*words, *more), tmp_path / "log2").ok()
    before, after = weights_of(work.model), weights_of(saved)
    moved = {name for name in before.keys() & after.keys() if not before[name].equal(after[name])}
    kept = before.keys() & after.keys() - moved
    assert kept and all("self_attn" in name for name in kept), kept
    assert not any("self_attn" in name for name in moved), moved


@pytest.mark.extended
def test_what_the_critic_starts_from(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """Checkpoints of an earlier critic; the critic of the checkpoint with --finetune; a Hugging
    Face model without a head."""
    recorded = dict(
        debug_train_only="",
        load_debug_rollout_data=full_run / "rollout_{rollout_id}",
        num_rollout=1,
    )
    first = {}
    for name, changes in {
        "checkpoint": dict(critic_load=full_run / "checkpoints"),
        "finetune": dict(load=full_run / "checkpoints", finetune=""),
        "both": dict(load=full_run / "checkpoints", finetune="", critic_load=work.model),
        "model": dict(critic_load=work.model),
    }.items():
        server.train(
            work.flags(tmp_path / name, **{**PPO, **recorded, **changes}), tmp_path / f"{name}.log"
        ).ok()
        first[name] = rows_of(tmp_path / name)[0]["rollout/values_mean"]
    assert first["checkpoint"] == first["finetune"] != 0, "the same critic on the same tokens"
    assert first["both"] == first["model"] == 0


@pytest.mark.extended
def test_a_checkpoint_without_a_critic(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    plain = dict(
        advantage_estimator="grpo",
        lambd=None,
        gamma=None,
        critic_lr=None,
        value_clip=None,
        critic_lr_warmup_iters=None,
    )
    server.train(
        flags(work, tmp_path / "grpo", num_rollout=1, save=root, **plain), tmp_path / "log1"
    ).ok()
    done = server.train(
        flags(work, tmp_path / "ppo", num_rollout=2, load=root), tmp_path / "log2"
    ).ok()
    assert "has no critic: it starts from the policy's weights" in done.out
    assert [row["step"] for row in rows_of(tmp_path / "ppo")] == [2] and rows_of(tmp_path / "ppo")[
        0
    ]["rollout/values_mean"] == 0
    error = server.train(
        flags(work, tmp_path / "wrong", num_rollout=1, critic_load=root), tmp_path / "log3"
    ).error()
    assert "has no network 'critic'; it has: policy" in error
    done = server.train(
        flags(work, tmp_path / "back", num_rollout=3, load=full_run / "checkpoints", **plain),
        tmp_path / "log4",
    ).ok()
    assert "has a critic, which this --advantage-estimator does not use" in done.out


def test_values_that_are_not_finite_stop_the_run(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """One message, on both ranks alike."""
    argv = flags(
        work,
        tmp_path,
        num_rollout=4,
        critic_lr=1e30,
        critic_lr_warmup_iters=0,
        clip_grad=0,
        lr_decay_iters=100,
    )
    error = server.train(argv, tmp_path / "log", ranks=2).error()
    wanted = (
        "the value of the critic of sample",
        "critic's optimizer step skipped",
        "has value_loss inf",  # the first of them that overflows depends on the processor
    )
    assert any(words in error for words in wanted)
