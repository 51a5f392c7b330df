"""Whole runs that draw more prompts than they train on: filters, stragglers, partial rollouts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer

NONZERO = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
# groups of two often have equal rewards
REWARD = "def few(args, sample):\n    return float(sum(c.isalpha() for c in sample.response) % 2)\n"
PARTIAL = dict(partial_rollout="", over_sampling_batch_size=6, rollout_slice_len=3, n_samples_per_prompt=2, token_tis_ratio_clip_high=2.0,
               tis_ratio_type="token", max_train_rollout_diff=0.001, micro_batch_size=2)  # fmt: skip


def scheduled(work: Workspace, out: Path, **changes: Any) -> list[str]:
    reward = out.parent / "few.py"
    reward.write_text(REWARD)
    more = {
        "custom_rm_path": f"{reward}:few",
        "save_debug_rollout_data": out / "r_{rollout_id}",
        "save_hf": out / "hf",
        "rollout_stop_token_ids": " ".join(map(str, range(20, 60))),
    }
    return work.flags(out, **{**more, **PARTIAL, **changes})


@pytest.mark.slow
def test_partial_rollouts_resume_exactly(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    full_run, parts = tmp_path / "whole", tmp_path / "parts"
    server.train(
        scheduled(work, full_run, num_rollout=4, save=full_run / "c", save_interval=2),
        full_run / "log",
    ).ok()
    rows = rows_of(full_run)
    assert rows[1]["rollout/groups_waiting"] > 0, "nothing was carried over the checkpoint"
    assert sum(row["rollout/groups_resumed"] for row in rows) > 0
    assert max(row["rollout/staleness_max"] for row in rows) >= 1
    server.train(scheduled(work, parts, num_rollout=2, save=parts / "c"), parts / "log").ok()
    server.train(
        scheduled(work, parts, num_rollout=4, load=parts / "c", save=parts / "c"), parts / "log2"
    ).ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows)
    expected, found = weights_of(full_run / "hf"), weights_of(parts / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.mark.slow
def test_partial_rollouts_do_not_depend_on_ranks(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    server.train(scheduled(work, one), one / "log").ok()
    server.train(scheduled(work, two), two / "log", ranks=2).ok()
    assert sampled(two / "r_{rollout_id}", 0) == sampled(one / "r_{rollout_id}", 0)
    for name in ("groups_drawn", "groups_waiting", "groups_kept", "wasted_tokens"):
        assert rows_of(two)[0][f"rollout/{name}"] == rows_of(one)[0][f"rollout/{name}"]


def test_dapo_keeps_groups_with_spread(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "dapo"
    flags = scheduled(
        work,
        out,
        partial_rollout=None,
        over_sampling_batch_size=None,
        rollout_slice_len=None,
        dynamic_sampling_filter_path=NONZERO,
    )
    server.train(flags, out / "log").ok()
    for rollout, row in enumerate(rows_of(out)):
        rewards: dict[int, set[float | None]] = {}
        for sample_id, (_, reward) in sampled(out / "r_{rollout_id}", rollout).items():
            rewards.setdefault(sample_id // 2, set()).add(reward)
        assert len(rewards) == 4 and all(len(values) == 2 for values in rewards.values())
        assert (
            row["rollout/groups_drawn"]
            == row["rollout/groups_kept"]
            + row["rollout/groups_dropped"]
            + row["rollout/groups_surplus"]
        )
    assert sum(row["rollout/groups_dropped"] for row in rows_of(out)) > 0


def test_a_filter_that_keeps_nothing_is_an_error(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "none.py").write_text("def nothing(args, samples, **more):\n    return False\n")
    flags = scheduled(
        work,
        tmp_path / "out",
        dynamic_sampling_filter_path=f"{tmp_path / 'none.py'}:nothing",
        max_num_gen_batches=2,
    )
    error = server.train(flags, tmp_path / "log").error()
    assert "2 draws of 6 prompts (--max-num-gen-batches) gave 0 of 4 groups" in error
    assert re.search(r"by reason: dropped (9|1[0-2])\.", error), (
        "three of twelve that are not finished cannot be four"
    )


def test_epochs_in_place_of_rollouts(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """Two epochs of six prompts in rollouts of four: three rollouts, which have every prompt twice,
    each cut into two optimizer steps."""
    out = tmp_path / "out"
    flags = work.flags(out, num_rollout=None, num_epoch=2, prompt_data=f"{work.prompts}@[0:6]", save_debug_rollout_data=out / "r_{rollout_id}",
                       n_samples_per_prompt=2, micro_batch_size=4)  # fmt: skip
    server.train(flags, tmp_path / "log").ok()
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3]
    texts = Counter(
        group.samples[0].text
        for k in range(3)
        for group in load_rollout(str(out / "r_{rollout_id}"), k)
    )
    assert len(texts) == 6 and set(texts.values()) == {2}
