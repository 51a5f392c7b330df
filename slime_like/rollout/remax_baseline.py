"""ReMax baseline: the reward of the greedy response to each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from slime_like.engines.base import SamplingParams
from slime_like.rollout.failures import warn_failed
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.samples.index import AnySample
from slime_like.types import GREEDY_REWARD, Prompt, Sample


def with_greedy_rewards(
    rollouter: Rollouter,
    prompts: Sequence[Prompt],
    groups: Sequence[SampleGroup],
    sampling: SamplingParams,
) -> list[SampleGroup]:
    """Add the reward of the greedy response to each prompt to the metadata of its samples; NaN if
    that response has no reward. Collective.

    sampling: Sampling parameters of the groups; only the temperature is replaced.
    """
    greedy = rollouter.generate(prompts, 1, replace(sampling, temperature=0.0), purpose="greedy")
    what = "greedy responses (ReMax)"
    effect = "their groups get an advantage of 0"
    warn_failed(flatten(greedy), what, effect, rollouter.group)
    rewards = {group.group_id: group.samples[0].reward for group in greedy}

    def with_reward(sample: AnySample) -> AnySample:
        reward = rewards[sample.group_id]
        value = math.nan if reward is None else reward
        if isinstance(sample, Sample):
            return replace(sample, metadata={**sample.metadata, GREEDY_REWARD: value})
        return sample.with_greedy_reward(value)

    return [SampleGroup(g.group_id, tuple(map(with_reward, g.samples))) for g in groups]
