"""The greedy response to each prompt, whose reward is ReMax's baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from slime_like.rollout.engines.base import SamplingParams
from slime_like.rollout.rollouter import Rollouter
from slime_like.types import Prompt, SampleGroup

GREEDY_REWARD = "greedy_reward"  # key of a sample's metadata, so that recorded rollouts have it too


def with_greedy_rewards(
    rollouter: Rollouter,
    prompts: Sequence[Prompt],
    groups: Sequence[SampleGroup],
    sampling: SamplingParams,
) -> list[SampleGroup]:
    """The groups, each sample with the reward of the greedy response to its prompt in its metadata;
    NaN where that has no reward.

    sampling: of the groups, which sets all but the temperature. Every rank calls this.
    """
    greedy = rollouter.generate(prompts, 1, replace(sampling, temperature=0.0), purpose="greedy")
    rewards = {group.group_id: group.samples[0].reward for group in greedy}
    result = []
    for group in groups:
        reward = rewards[group.group_id]
        value = math.nan if reward is None else reward
        samples = tuple(
            replace(s, metadata={**s.metadata, GREEDY_REWARD: value}) for s in group.samples
        )
        result.append(SampleGroup(group.group_id, samples))
    return result
