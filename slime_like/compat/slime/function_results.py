"""Validation of what a user's rollout function returned: slime's output classes, or the plain lists
of its older functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from slime_like.compat.slime.samples import (
    SlimeArgs,
    SlimeSample,
    empty_sample,
    from_slime,
    prompt_tokens,
)
from slime_like.metrics.names import UNKNOWN_VERSIONS
from slime_like.rewards.limit import require_within
from slime_like.rollout.evaluate import score, score_rewards
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import awaits_reward
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the groups of a rollout."""

    name: str  # of the function, for messages
    args: SlimeArgs
    tokenizer: PreTrainedTokenizerBase
    groups: int  # number of groups
    samples: int  # per group
    vocab_size: int | None  # None if unknown
    newest_version: int


def read_train_output(
    result: object, expected: Expected
) -> tuple[list[list[Sample]], dict[str, float]]:
    """The groups by id, and metrics. Raises ValueError naming the function, and the invalid group
    or sample."""
    name = expected.name
    groups, metrics = _parts(result, "samples")
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise ValueError(
            f"{name}: the function returned {_shape(groups)}; return a list of groups, each a list "
            "of slime_like.compat.slime.api.Sample"
        )
    sizes = [len(group) for group in groups]
    if sizes != [expected.samples] * expected.groups:
        raise ValueError(
            f"{name}: the function returned {len(groups)} groups of {sorted(set(sizes))} samples, "
            f"must be {expected.groups} groups (--rollout-batch-size) of {expected.samples} "
            "samples (--n-samples-per-prompt)"
        )
    read = []
    for group in groups:
        read.append([_read_sample(sample, expected) for sample in group])
    samples = list(chain.from_iterable(read))
    _check_ids(read, name)
    trained = [sample for sample in samples if sample.loss_mask.any()]
    missing = [sample.sample_id for sample in trained if sample.rollout_log_probs is None]
    if missing and len(missing) < len(trained):
        raise ValueError(
            f"{name}: sample {missing[0]} has no rollout_log_probs, but others do; set them on all "
            "samples or on none"
        )
    read.sort(key=lambda group: group[0].group_id)
    return read, read_metrics(metrics, name, "rollout/") | _unknown_versions(samples)


def _is_group(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(sample, SlimeSample) for sample in value)


def _read_sample(sample: SlimeSample, expected: Expected) -> Sample:
    before = empty_sample(sample, expected.name)
    place = f"{expected.name}: sample {sample.index}"
    if not all(isinstance(token, int) for token in sample.tokens):
        raise ValueError(f"{place}: tokens must be a list of int")
    vocab_size = expected.vocab_size or math.inf
    tokens = sample.tokens
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"{place}: tokens from {min(tokens)} to {max(tokens)}, must be 0 to {vocab_size}-1"
        )
    if sample.status == SlimeSample.Status.ABORTED and not sample.tokens:  # nothing was generated
        prompt = prompt_tokens(sample, expected.tokenizer)
        return replace(
            before, tokens=torch.tensor(prompt, dtype=torch.int64), status=SampleStatus.ABORTED
        )
    ours = from_slime(
        sample, before, sample.engine_outputs, expected.args, expected.tokenizer, flag=expected.name
    )
    if awaits_reward(ours):
        raise ValueError(
            f"{place}: has no reward; set it (async_rm computes it), or set the status FAILED"
        )
    if not sample.engine_outputs:
        ours = replace(ours, weight_versions=_reported_versions(sample, ours, place))
    newest = max(ours.weight_versions, default=NOT_SAMPLED)
    if newest > expected.newest_version:
        raise ValueError(
            f"{place}: weight version {newest}, newer than the engine's, {expected.newest_version}"
        )
    if sample.remove_sample:
        return replace(ours, loss_mask=torch.zeros_like(ours.loss_mask))
    return ours


def _reported_versions(sample: SlimeSample, ours: Sample, place: str) -> tuple[int, ...]:
    """Weight versions of a sample without engine outputs: the oldest version that the sample names,
    for every trained token; unknown if it names none."""
    try:
        oldest = min((int(version) for version in sample.weight_versions), default=NOT_SAMPLED)
    except (TypeError, ValueError):
        raise ValueError(
            f"{place}: weight_versions {sample.weight_versions!r}, must be numbers"
        ) from None
    return tuple(oldest if trained else NOT_SAMPLED for trained in ours.loss_mask.tolist())


def _check_ids(groups: Sequence[Sequence[Sample]], name: str) -> None:
    """Check that the samples of a group have the same group_index, and that all ids are unique."""
    for group in groups:
        group_ids = sorted({sample.group_id for sample in group})
        if len(group_ids) > 1:
            raise ValueError(
                f"{name}: a group has samples with group_index {group_ids}, must be equal"
            )
    _check_unique([group[0].group_id for group in groups], f"{name}: group_index")
    _check_unique([s.sample_id for s in chain.from_iterable(groups)], f"{name}: index")


def _check_unique(ids: Sequence[int], what: str) -> None:
    repeated = [id for id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ValueError(f"{what} {min(repeated)} occurs twice")


def _unknown_versions(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of trained tokens with an unknown weight version."""
    trained = 0
    unknown = 0
    for sample in samples:
        trained += int(sample.loss_mask.sum())
        versions = zip(sample.weight_versions, sample.loss_mask.tolist())
        unknown += sum(version == NOT_SAMPLED and mask for version, mask in versions)
    return {UNKNOWN_VERSIONS: unknown / max(trained, 1)}


def read_eval_output(
    result: object, name: str, args: SlimeArgs, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Scores by metric name, from the rewards and, if given, from the samples. Raises ValueError
    naming the function and the set."""
    data, metrics = _parts(result, "data")
    if not isinstance(data, dict) or not data:
        raise ValueError(
            f"{name}: the evaluation returned {_shape(data)}; return "
            "RolloutFnEvalOutput(data={set: {'rewards': [...]}})"
        )
    scores = read_metrics(metrics, name, "eval/")
    for each, values in data.items():
        place = f"{name}: evaluation set {each!r}"
        if not isinstance(each, str) or not isinstance(values, dict):
            raise ValueError(f"{place}: must be a name and a dict")
        columns = {key: values.get(key) for key in ("rewards", "truncated", "samples")}
        rewards, truncated, samples = columns.values()
        if not isinstance(rewards, list | tuple):
            raise ValueError(f"{place}: must have the list 'rewards'")
        lengths = {key: len(column) for key, column in columns.items() if column is not None}
        if not rewards or len(set(lengths.values())) > 1:
            raise ValueError(f"{place}: lists of lengths {lengths}, must be equal and not 0")
        numbers = [None if r is None else _number(r, f"{place}: a reward") for r in rewards]
        for number in numbers:
            require_within(number, args.max_abs_reward, place)
        if samples:
            scores |= score(each, _groups_of(samples, numbers, place, args, tokenizer))
        else:
            flags = None if truncated is None else list(map(bool, truncated))
            scores |= score_rewards(each, numbers, flags)
    return scores


def _groups_of(
    samples: Sequence[object],
    rewards: Sequence[float | None],
    place: str,
    args: SlimeArgs,
    tokenizer: PreTrainedTokenizerBase,
) -> list[SampleGroup]:
    groups: dict[int, list[Sample]] = {}
    for number, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        if not isinstance(sample, SlimeSample):
            raise ValueError(
                f"{place}: samples[{number}] is {type(sample).__name__}, must be a Sample"
            )
        # slime's own evaluation numbers only samples, not groups
        group_id = number if sample.group_index is None else sample.group_index
        before = empty_sample(SlimeSample(group_id, number, sample.prompt), place)
        ours = from_slime(sample, before, sample.engine_outputs, args, tokenizer, flag=place)
        groups.setdefault(group_id, []).append(replace(ours, reward=reward))
    return [SampleGroup(group_id, tuple(members)) for group_id, members in sorted(groups.items())]


def read_metrics(metrics: object, name: str, prefix: str) -> dict[str, float]:
    """Metrics with `prefix` added to their names. Raises ValueError for a value that is not a
    finite number."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ValueError(f"{name}: metrics is {_shape(metrics)}; must be numbers by name")
    result = {}
    for key, value in metrics.items():
        number = _number(value, f"{name}: metric {key!r}")
        if not math.isfinite(number):
            raise ValueError(f"{name}: metric {key!r} is {number}, must be finite")
        result[key if key.startswith(prefix) else prefix + key] = number
    return result


def _number(value: object, what: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{what} is {type(value).__name__}, must be a number")
    return float(value)


def _parts(result: object, attribute: str) -> tuple[object, object]:
    """Content and metrics of slime's output class; a plain value is content only."""
    if hasattr(result, attribute) and hasattr(result, "metrics"):
        return getattr(result, attribute), result.metrics
    return result, None


def _shape(value: object) -> str:
    """Description of a value of the wrong type."""
    if isinstance(value, list | dict) and not value:
        return f"an empty {type(value).__name__}"
    if isinstance(value, list):
        inner = value[0]
        if isinstance(inner, list) and inner:
            return f"a list of lists of {type(inner[0]).__name__}"
        return f"a list of {type(inner).__name__}"
    return type(value).__name__
