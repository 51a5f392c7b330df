"""Metrics of a rollout by the source of its prompts, with a mix (--prompt-data sources.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from slime_like.distributed.collectives import gather
from slime_like.rollout.failures import failed_fraction, is_failed
from slime_like.samples.episodes import truncated_fraction
from slime_like.samples.exchange import all_sequences
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.types import PROMPT_SOURCE, Sample


def source_of_groups(
    groups: Sequence[SampleGroup], group: dist.ProcessGroup | None = None
) -> dict[int, str]:
    """The source of each group, by its id, on all ranks. Collective.

    Args:
        groups: Each sample is complete on the rank that generated it.
        group: Process group of all ranks, if the default group is in use at the same time.
    """
    local: dict[int, str] = {}
    for sample in flatten(groups):
        if isinstance(sample, Sample) and PROMPT_SOURCE in sample.metadata:
            local[sample.group_id] = sample.metadata[PROMPT_SOURCE]["name"]
    names: dict[int, str] = {}
    for each in gather(local, group):
        names |= each
    return names


def source_metrics(
    groups: Sequence[SampleGroup],
    names: Mapping[int, str],
    pass_rewards: Mapping[str, float],
    *,
    graded: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """rollout/<source>/groups, and for a source with groups what `rollout_metrics` has for all
    samples, and the pass rate. Lengths are those of all sequences of an episode. Collective if an
    episode has several.

    Args:
        groups: Of the rollout.
        names: The source of each group, by its id.
        pass_rewards: By source, the reward from which on a sample passes.
        graded: Samples have rewards.
        group: Process group of all ranks, if the default group is in use at the same time.
    """
    sequences = all_sequences(flatten(groups), group)
    metrics: dict[str, float] = {}
    for name, pass_reward in pass_rewards.items():
        of_source = [each for each in groups if names.get(each.group_id) == name]
        prefix = f"rollout/{name}"
        metrics[f"{prefix}/groups"] = float(len(of_source))
        samples = flatten(of_source)
        if not samples:
            continue
        own = [sequence for sequence in sequences if names.get(sequence.group_id) == name]
        lengths = sum(sequence.response_length for sequence in own)
        metrics[f"{prefix}/response_length_mean"] = lengths / len(own)
        metrics[f"{prefix}/truncated_frac"] = truncated_fraction(own)
        if not graded:
            continue
        metrics[f"{prefix}/failed_frac"] = failed_fraction(samples)
        rewards = [s.reward for s in samples if s.reward is not None and not is_failed(s)]
        if rewards:
            values = torch.tensor(rewards, dtype=torch.float64)
            metrics[f"{prefix}/reward_mean"] = float(values.mean())
            metrics[f"{prefix}/reward_std"] = float(values.std(correction=0))
            metrics[f"{prefix}/pass_rate"] = float((values >= pass_reward).double().mean())
    return metrics
