"""Metrics by source: those of its own samples only."""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_like.rollout.evaluate import score
from slime_like.rollout.source_metrics import source_metrics
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus


def group(number: int, *rewards: float | None) -> SampleGroup:
    length = number + 1
    samples = [
        Sample(
            group_id=number,
            sample_id=10 * number + i,
            tokens=torch.zeros(length + 1, dtype=torch.int64),
            response_length=length,
            loss_mask=torch.ones(length, dtype=torch.bool),
            reward=reward,
            status=SampleStatus.FAILED if reward is None else SampleStatus.COMPLETED,
        )
        for i, reward in enumerate(rewards)
    ]
    return SampleGroup(number, tuple(samples))


def test_each_source_has_its_own() -> None:
    groups = [group(0, 1.0, 0.0), group(1, 0.5, None), group(2, 1.0, 1.0)]
    names = {0: "a", 1: "b", 2: "a"}
    metrics = source_metrics(groups, names, {"a": 1.0, "b": 0.5, "c": 1.0})
    assert metrics["rollout/a/groups"] == 2 and metrics["rollout/c/groups"] == 0
    assert metrics["rollout/a/reward_mean"] == 0.75 and metrics["rollout/a/pass_rate"] == 0.75
    assert metrics["rollout/b/reward_mean"] == 0.5 and metrics["rollout/b/pass_rate"] == 1.0
    assert metrics["rollout/b/failed_frac"] == 0.5 and metrics["rollout/a/failed_frac"] == 0
    assert metrics["rollout/a/response_length_mean"] == 2 and metrics["rollout/b/reward_std"] == 0
    assert [name for name in metrics if name.startswith("rollout/c/")] == ["rollout/c/groups"]


def test_lengths_are_those_of_all_sequences_of_an_episode() -> None:
    episode, other, branch = complete(
        group(number, reward).samples[0] for number, reward in ((0, 1.0), (0, 0.0), (3, 0.0))
    )
    branched = replace(
        episode, status=SampleStatus.TRUNCATED, branches=(replace(branch, group_id=0, sample_id=0),)
    )
    groups = [SampleGroup(0, (branched, replace(other, sample_id=1))), group(1, 1.0)]
    metrics = source_metrics(groups, {0: "a", 1: "b"}, {"a": 1.0, "b": 1.0})
    assert metrics["rollout/a/response_length_mean"] == 2  # 1, its branch of 4, and 1
    assert metrics["rollout/a/truncated_frac"] == 2 / 3
    assert metrics["rollout/a/reward_mean"] == 0.5 and metrics["rollout/a/pass_rate"] == 0.5
    assert metrics["rollout/b/response_length_mean"] == 2
    scores = score("a", groups[:1])
    assert scores["eval/a/response_length_mean"] == 2 and scores["eval/a/truncated_frac"] == 2 / 3
    assert scores["eval/a/mean"] == 0.5


def test_given_answers_have_no_rewards() -> None:
    groups = [group(0, None)]
    metrics = source_metrics(groups, {0: "a"}, {"a": 1.0}, graded=False)
    assert metrics == {
        "rollout/a/groups": 1.0,
        "rollout/a/response_length_mean": 1.0,
        "rollout/a/truncated_frac": 0.0,
    }
