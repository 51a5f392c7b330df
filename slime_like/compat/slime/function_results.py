"""What a user's function for whole rollouts returned, checked: slime's outputs, or the plain lists
of its older functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, blank, from_slime
from slime_like.rollout.evaluate import score, score_rewards
from slime_like.sample_index import UNKNOWN_VERSIONS
from slime_like.types import NOT_SAMPLED, Sample, SampleGroup, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TRAINED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the groups of a rollout. name: of the function, for messages. vocab_size:
    None if unknown."""

    name: str
    args: SlimeArgs
    tokenizer: PreTrainedTokenizerBase
    groups: int
    samples: int
    vocab_size: int | None
    newest_version: int


def read_train_output(
    result: object, expected: Expected
) -> tuple[list[list[Sample]], dict[str, float]]:
    """The groups in order of their number, and metrics. Raises ValueError naming the function, and
    the invalid group or sample."""
    name = expected.name
    groups, metrics = _parts(result, "samples")
    if not isinstance(groups, list) or not all(
        isinstance(g, list) and all(isinstance(s, SlimeSample) for s in g) for g in groups
    ):
        raise ValueError(
            f"{name}: the function returned {_shape(groups)}; return a list of groups, each a list "
            "of slime_like.compat.slime.api.Sample"
        )
    sizes = [len(group) for group in groups]
    if sizes != [expected.samples] * expected.groups:
        raise ValueError(
            f"{name}: the function returned {len(groups)} groups of {sorted(set(sizes))} samples; --rollout-batch-size asks for "
            f"{expected.groups} groups, and --n-samples-per-prompt for {expected.samples} samples in each"
        )
    read = [[_read_sample(sample, expected) for sample in group] for group in groups]
    _check_numbers(read, name)
    every = [sample for group in read for sample in group]
    telling = {sample.rollout_log_probs is not None for sample in every if sample.loss_mask.any()}
    if len(telling) == 2:
        silent = next(s for s in every if s.rollout_log_probs is None and s.loss_mask.any())
        raise ValueError(
            f"{name}: sample {silent.sample_id} has no rollout_log_probs, and others have; set them on all samples or on none"
        )
    read.sort(key=lambda group: group[0].group_id)
    return read, read_metrics(metrics, name, "rollout/") | _unknown_versions(every)


def _read_sample(sample: SlimeSample, expected: Expected) -> Sample:
    before = blank(sample, expected.name)
    place = f"{expected.name}: sample {sample.index}"
    if not all(isinstance(token, int) for token in sample.tokens):
        raise ValueError(f"{place}: tokens must be a list of int")
    if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < (
        expected.vocab_size or math.inf
    ):
        raise ValueError(
            f"{place}: tokens from {min(sample.tokens)} to {max(sample.tokens)}; the model has 0 to {expected.vocab_size or 0}-1"
        )
    if sample.status == SlimeSample.Status.ABORTED and not sample.tokens:  # nothing was generated
        prompt = expected.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        return replace(
            before, tokens=torch.tensor(prompt, dtype=torch.int64), status=SampleStatus.ABORTED
        )
    ours = from_slime(
        sample, before, sample.written, expected.args, expected.tokenizer, flag=expected.name
    )
    if ours.reward is None and ours.status in _TRAINED:
        raise ValueError(
            f"{place}: has no reward; set it (async_rm computes it), or set the status FAILED"
        )
    if not sample.written:
        ours = replace(ours, weight_versions=_told_versions(sample, ours, place))
    newest = max(ours.weight_versions, default=NOT_SAMPLED)
    if newest > expected.newest_version:
        raise ValueError(
            f"{place}: weight version {newest}, and the newest that the engine had is {expected.newest_version}"
        )
    removed = torch.zeros_like(ours.loss_mask)
    return replace(ours, loss_mask=removed) if sample.remove_sample else ours


def _told_versions(sample: SlimeSample, ours: Sample, place: str) -> tuple[int, ...]:
    """Weight versions of a sample that our engine is not known to have generated: the oldest
    version that the sample names, for every trained token; unknown if it names none."""
    try:
        oldest = min((int(version) for version in sample.weight_versions), default=NOT_SAMPLED)
    except (TypeError, ValueError):
        raise ValueError(
            f"{place}: weight_versions {sample.weight_versions!r}; must be numbers"
        ) from None
    return tuple(oldest if trained else NOT_SAMPLED for trained in ours.loss_mask.tolist())


def _check_numbers(groups: Sequence[Sequence[Sample]], name: str) -> None:
    """Check that the samples of a group have its number, and that no number occurs twice."""
    for group in groups:
        numbers = sorted({sample.group_id for sample in group})
        if len(numbers) > 1:
            raise ValueError(
                f"{name}: a group has samples with group_index {numbers}; the samples of a group have the same"
            )
    for what, numbers in (
        ("group_index", [g[0].group_id for g in groups]),
        ("index", [s.sample_id for g in groups for s in g]),
    ):
        twice = (
            sorted({n for n in numbers if numbers.count(n) > 1})
            if len(set(numbers)) < len(numbers)
            else []
        )
        if twice:
            raise ValueError(f"{name}: {what} {twice[0]} is there twice")


def _unknown_versions(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of trained tokens with an unknown weight version."""
    trained = sum(int(s.loss_mask.sum()) for s in samples)
    unknown = sum(
        v == NOT_SAMPLED and m
        for s in samples
        for v, m in zip(s.weight_versions, s.loss_mask.tolist())
    )
    return {UNKNOWN_VERSIONS: unknown / max(trained, 1)}


def read_eval_output(
    result: object, name: str, args: SlimeArgs, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Scores by metric name, from the rewards and, if given, from the samples. Raises ValueError
    naming the function and the set."""
    data, metrics = _parts(result, "data")
    if not isinstance(data, dict) or not data:
        raise ValueError(
            f"{name}: an evaluation returned {_shape(data)}; return RolloutFnEvalOutput(data={{set: {{'rewards': [...]}}}})"
        )
    scores = read_metrics(metrics, name, "eval/")
    for each, values in data.items():
        place = f"{name}: evaluation set {each!r}"
        if (
            not isinstance(each, str)
            or not isinstance(values, dict)
            or not isinstance(values.get("rewards"), list | tuple)
        ):
            raise ValueError(f"{place}: must be a name, and a dict with the list 'rewards'")
        rewards, truncated, samples = (
            values.get(key) for key in ("rewards", "truncated", "samples")
        )
        lengths = {
            key: len(values[key])
            for key in ("rewards", "truncated", "samples")
            if values.get(key) is not None
        }
        if not rewards or len(set(lengths.values())) > 1:
            raise ValueError(
                f"{place}: the lists have lengths {lengths}; they must be equal, and not 0"
            )
        numbers = [
            _number(reward, f"{place}: a reward") if reward is not None else None
            for reward in rewards
        ]
        if samples:
            scores |= score(each, _groups_of(samples, numbers, place, args, tokenizer))
        else:
            scores |= score_rewards(
                each, numbers, None if truncated is None else [bool(t) for t in truncated]
            )
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
        filled = (
            number if sample.group_index is None else sample.group_index
        )  # slime's own evaluation numbers only samples, not groups
        before = replace(blank(SlimeSample(filled, number, sample.prompt), place), reward=None)
        ours = from_slime(sample, before, sample.written, args, tokenizer, flag=place)
        groups.setdefault(filled, []).append(replace(ours, reward=reward))
    return [SampleGroup(group_id, tuple(members)) for group_id, members in sorted(groups.items())]


def read_metrics(metrics: object, name: str, prefix: str) -> dict[str, float]:
    """Metrics with `prefix` added to their names. Raises ValueError for a value that is not a
    finite number."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ValueError(f"{name}: metrics is {_shape(metrics)}; must be numbers by name")
    found = {
        key if key.startswith(prefix) else prefix + key: _number(value, f"{name}: metric {key!r}")
        for key, value in metrics.items()
    }
    wrong = [key for key, value in found.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"{name}: metric {wrong[0]!r} is {found[wrong[0]]}; must be finite")
    return found


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
    if isinstance(value, list) and value:
        inner = value[0]
        return f"a list of {'lists of ' + type(inner[0]).__name__ if isinstance(inner, list) and inner else type(inner).__name__}"
    return (
        f"an empty {type(value).__name__}"
        if isinstance(value, list | dict) and not value
        else type(value).__name__
    )
