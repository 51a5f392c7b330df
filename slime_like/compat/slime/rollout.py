"""slime's functions for custom rollouts: those of ``slime.rollout.sglang_rollout``,
``slime.rollout.rm_hub`` and ``slime.rollout.base_types``, over whichever engine the run has. Import
them from `api.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from slime_like.compat.slime.requests import sampling_dict, sampling_of
from slime_like.compat.slime.rollout_context import RolloutContext, rollout_context
from slime_like.compat.slime.samples import (
    SlimeSample,
    blank,
    from_slime,
    refuse_token_rewards,
    to_slime_written,
)
from slime_like.data.prompts import Choose, PendingGroup
from slime_like.import_utils import load_function
from slime_like.rollout.collector import Collector, decide_locally
from slime_like.rollout.hooks import SAMPLE_FILTER, group_filters
from slime_like.rollout.streaming import StreamGeneration
from slime_like.types import Prompt, Sample, SampleStatus, complete

Group = list[SlimeSample]
Result = TypeVar("Result")
_DONE = (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED)


@dataclass(slots=True)
class RolloutFnTrainOutput:
    """metrics: numbers by name; they are logged under rollout/."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """data: by name of an evaluation set, {"rewards": [...], "truncated": [...], "samples": [...]};
    the last two are optional."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def run(coroutine: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine in a new event loop and wait for it, like ``slime.utils.async_utils.run``."""
    return asyncio.run(coroutine)


async def generate(
    args: object, sample: SlimeSample, sampling_params: Mapping[str, object]
) -> SlimeSample:
    """Let the engine finish the sample, which is modified and returned. After an abort it is
    PENDING or ABORTED, and another call continues it."""
    context = rollout_context()
    sampling = sampling_of(sampling_params, context.responder.sampling)
    return _take(sample, await context.responder.generate(_unfinished(sample, context), sampling))


async def generate_and_rm(
    args: Any, sample: SlimeSample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> SlimeSample:
    """`generate`, or --custom-generate-function-path, then the reward unless it is per group.
    Finished samples are unchanged."""
    context = rollout_context()
    responder = context.responder
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in _DONE or responder.stopped:
        return sample
    sampling = sampling_of(sampling_params, responder.sampling)
    found = _unfinished(sample, context)
    return _take(sample, await responder.respond(found, sampling, evaluation=evaluation))


async def generate_and_rm_group(
    args: object, group: Group, sampling_params: Mapping[str, object], evaluation: bool = False
) -> Group:
    """Generate all samples of a group, with the group reward if the run has one."""
    done = list(
        await asyncio.gather(
            *(generate_and_rm(args, sample, sampling_params, evaluation) for sample in group)
        )
    )
    grades_groups = rollout_context().responder.grader.args.group_rm
    if grades_groups and all(sample.status in _DONE for sample in done):
        for sample, reward in zip(done, await batched_async_rm(args, done), strict=True):
            sample.reward = reward
    return done


async def async_rm(args: object, sample: SlimeSample, **more: object) -> float | None:
    """The run's reward of a sample. If its function fails, the sample becomes FAILED, with the
    reason in its metadata, and the result is None."""
    (reward,) = await batched_async_rm(args, [sample])
    return reward


async def batched_async_rm(
    args: object, samples: Sequence[SlimeSample], **more: object
) -> list[float | None]:
    """Rewards of several samples; with --group-rm they form a group."""
    context = rollout_context()
    ours = [_read(s, context, allow_unfinished=False) for s in samples]
    graded = await context.responder.grade([replace(sample, reward=None) for sample in ours])
    for sample, answer in zip(samples, graded, strict=True):
        if answer.status == SampleStatus.FAILED:
            sample.status, sample.metadata = SlimeSample.Status.FAILED, dict(answer.metadata)
        refuse_token_rewards(answer)
    return [answer.reward for answer in graded]


class _DataSourceGroups:
    """Adapter from a user's data source to what a `Collector` samples from."""

    def __init__(self, data_source: Any, context: RolloutContext) -> None:
        self.num_waiting = 0
        self._data_source = data_source
        self._context = context

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]:
        """Take groups from the data source, which makes the choice itself. Raises ValueError if it
        returns other groups than requested."""
        groups = self._data_source.get_samples(count)
        wanted = self._context.config.rollout.n_samples_per_prompt
        sizes = [len(group) for group in groups]
        if sizes != [wanted] * count:
            raise ValueError(
                f"data_source.get_samples({count}) returned {len(sizes)} groups of "
                f"{sorted(set(sizes))} samples; --n-samples-per-prompt is {wanted}"
            )
        for group in groups:
            for sample in group:
                if sample.group_index is None:
                    sample.group_index = group[0].index
        return [self._pending(group) for group in groups], []

    def requeue(self, groups: Sequence[PendingGroup]) -> None:
        self.num_waiting += len(groups)
        if groups:
            self._data_source.add_samples([_to_slime(complete(group.samples)) for group in groups])

    def _pending(self, group: Group) -> PendingGroup:
        samples = tuple(_open(sample, self._context) for sample in group)
        first = samples[0]
        tokens = tuple(first.tokens[: first.prompt_length].tolist())
        prompt = Prompt(first.group_id, first.text, tokens, first.label, first.metadata)
        return PendingGroup(prompt, samples)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The rollout of a run without a custom function, for functions that wrap it: with
    over-sampling, filters, and unfinished samples. Must not be called from within an event loop."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    context = rollout_context()
    responder = context.responder
    collector = Collector(
        context.config,
        context.rollouter,
        _DataSourceGroups(data_source, context),
        responder.sampling,
        replace(group_filters(context.config), removed_samples=None),
    )
    with StreamGeneration(responder, args.rollout_time_limit_s) as generation:
        found = collector.collect_from(generation, rollout_id, decide_locally)
    groups = [_to_slime(complete(group.samples)) for group in found.groups]
    if args.rollout_sample_filter_path is not None:  # this sets remove_sample
        load_function(args.rollout_sample_filter_path, SAMPLE_FILTER)(context.args, groups)
    metrics = {name.removeprefix("rollout/"): value for name, value in found.metrics.items()}
    return RolloutFnTrainOutput(groups, metrics)


async def eval_rollout(args: object, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Evaluate the run's evaluation sets, like a run without a custom function."""
    context = rollout_context()
    evaluator, responder = context.evaluator, context.responder
    if evaluator is None:
        raise ValueError(
            f"{context.name}: eval_rollout needs evaluation sets (--eval-prompt-data or "
            "--eval-config, with --eval-interval)"
        )
    data = {}
    grader = responder.grader
    for each in evaluator.sets:
        n = each.n_samples_per_eval_prompt
        groups = [
            [
                SlimeSample(
                    p.group_id, p.group_id * n + j, p.text, label=p.label, metadata=dict(p.metadata)
                )
                for j in range(n)
            ]
            for p in evaluator.prompts[each.name]
        ]
        parameters = sampling_dict(evaluator.sampling(each))
        responder.purpose = f"eval/{each.name}"
        responder.grader = evaluator.grader(each.name) or grader
        try:
            await asyncio.gather(
                *(generate_and_rm_group(args, g, parameters, evaluation=True) for g in groups)
            )
        finally:
            responder.grader = grader
        samples = [sample for group in groups for sample in group]
        data[each.name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == SlimeSample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data), []


def _to_slime(samples: Sequence[Sample]) -> Group:
    return [to_slime_written(sample) for sample in samples]


def _read(sample: SlimeSample, context: RolloutContext, *, allow_unfinished: bool) -> Sample:
    return from_slime(
        sample,
        blank(sample, context.name),
        sample.written,
        context.args,
        context.rollouter.tokenizer,
        flag=context.name,
        allow_unfinished=allow_unfinished,
    )


def _open(sample: SlimeSample, context: RolloutContext) -> Sample:
    """Convert to our sample type, keeping it unfinished so that it may continue."""
    if sample.response_length:
        return _read(sample, context, allow_unfinished=True)
    tokens = sample.tokens
    if not tokens:
        tokens = context.rollouter.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    return replace(blank(sample, context.name), tokens=torch.tensor(tokens, dtype=torch.int64))


def _unfinished(sample: SlimeSample, context: RolloutContext) -> Sample:
    """`_open`, for a sample to be generated: it counts as unfinished, even if it is FAILED."""
    return replace(_open(sample, context), status=SampleStatus.PARTIAL)


def _take(sample: SlimeSample, ours: Sample) -> SlimeSample:
    """Overwrite `sample` with the content of `ours`."""
    found = to_slime_written(ours)
    for each in fields(SlimeSample):
        setattr(sample, each.name, getattr(found, each.name))
    return sample
