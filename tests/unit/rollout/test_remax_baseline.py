"""ReMax's baseline: one greedy response to each prompt, its reward with every sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from slime_like.batching.outcomes import outcomes_of
from slime_like.engines.base import SamplingParams
from slime_like.rollout.remax_baseline import with_greedy_rewards
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.groups import SampleGroup
from slime_like.types import Prompt, Sample


def group(group_id: int, rewards: Sequence[float | None]) -> SampleGroup:
    samples = [
        Sample(
            group_id,
            i,
            torch.arange(3),
            2,
            torch.tensor([True, i == 0]),
            reward=r,
            metadata={"task": "sums"},
        )
        for i, r in enumerate(rewards)
    ]
    return SampleGroup(group_id, tuple(samples))


class Recorder:
    """A rollouter whose greedy rewards are given."""

    group = None  # of collectives

    def __init__(self, rewards: dict[int, float | None]) -> None:
        self.rewards = rewards
        self.calls: list[tuple[int, SamplingParams, str]] = []

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, purpose: str
    ) -> list[SampleGroup]:
        self.calls.append((n, sampling, purpose))
        return [group(p.group_id, [self.rewards[p.group_id]]) for p in reversed(prompts)]


def test_every_sample_gets_the_reward_of_its_prompts_greedy_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder({4: 0.25, 9: None})
    prompts = [Prompt(group_id=i, text="", tokens=(1,)) for i in (4, 9)]
    sampling = SamplingParams(temperature=0.7, max_new_tokens=5, stop=("x",))
    groups = with_greedy_rewards(
        cast(Rollouter, recorder), prompts, [group(4, [1.0, None]), group(9, [2.0])], sampling
    )
    assert recorder.calls == [
        (1, SamplingParams(temperature=0.0, max_new_tokens=5, stop=("x",)), "greedy")
    ]
    reported = outcomes_of([s for g in groups for s in g.samples])
    assert reported.greedy_rewards is not None
    assert reported.greedy_rewards.tolist() == pytest.approx([0.25, 0.25, math.nan], nan_ok=True)
    assert reported.rewards.tolist() == pytest.approx([1.0, math.nan, 2.0], nan_ok=True)
    assert reported.group_ids.tolist() == [4, 4, 9] and reported.lengths.tolist() == [2, 1, 2]
    assert groups[0].samples[0].metadata["task"] == "sums"
    assert caplog.messages == [
        "greedy responses (ReMax): 1 of 2 samples have no usable response or reward and their groups "
        "get an advantage of 0; the first: sample 0: its reward is None"
    ]


def test_recorded_rollouts_without_them() -> None:
    samples: list[Any] = list(group(4, [1.0, 0.0]).samples)
    assert outcomes_of(samples).greedy_rewards is None
