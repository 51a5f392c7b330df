"""slime's functions for custom rollouts: those of ``slime.rollout.sglang_rollout``,
``slime.rollout.rm_hub`` and ``slime.rollout.base_types``, for any rollout engine. Import them from
`api.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slime_like.compat.slime.requests import (
    continue_response,
    current_call,
    sampling_dict,
    sampling_of,
)
from slime_like.compat.slime.rollout_context import RolloutContext, rollout_context
from slime_like.compat.slime.samples import (
    SlimeArgs,
    SlimeSample,
    empty_sample,
    from_slime,
    prompt_tokens,
    refuse_token_rewards,
    to_slime_with_output,
)
from slime_like.data.group_buffer import Choose, PendingGroup
from slime_like.import_utils import load_function
from slime_like.rollout.collector import Collector, decide_locally
from slime_like.rollout.episode import CUSTOM_GENERATE
from slime_like.rollout.hooks import SAMPLE_FILTER, group_filters
from slime_like.rollout.streaming import StreamGeneration
from slime_like.samples.episodes import complete
from slime_like.types import Prompt, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.compat.slime.sources import DataSource

Group = list[SlimeSample]
Result = TypeVar("Result")
_DONE = (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED)


@dataclass(slots=True)
class RolloutFnTrainOutput:
    """Result of a rollout function for training."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None  # numbers by name; they are logged under rollout/


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """Result of a rollout function for evaluation."""

    # by name of an evaluation set, {"rewards": [...], "truncated": [...], "samples": [...]}; the
    # last two are optional
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def run(coroutine: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine in a new event loop and wait for it, like ``slime.utils.async_utils.run``."""
    return asyncio.run(coroutine)


async def generate(
    args: object, sample: SlimeSample, sampling_params: Mapping[str, object]
) -> SlimeSample:
    """Let the engine finish the sample, which is modified and returned. After an abort it is
    PENDING or ABORTED, and another call continues it. Functions of --custom-generate-function-path
    may call it too, for what the run would generate without them."""
    if (call := current_call()) is not None:
        ours = _from_unfinished(sample, CUSTOM_GENERATE, call.args, call.model.tokenizer)
        return await continue_response(call, sample, ours, sampling_params)
    context = rollout_context()
    sampling = sampling_of(sampling_params, context.responder.sampling)
    result = await context.responder.generate(_unfinished(sample, context), sampling)
    return _overwrite(sample, result)


async def generate_and_rm(
    args: SlimeArgs,
    sample: SlimeSample,
    sampling_params: Mapping[str, object],
    evaluation: bool = False,
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
    unfinished = _unfinished(sample, context)
    return _overwrite(sample, await responder.respond(unfinished, sampling, evaluation=evaluation))


async def generate_and_rm_group(
    args: SlimeArgs, group: Group, sampling_params: Mapping[str, object], evaluation: bool = False
) -> Group:
    """Generate all samples of a group, with the group reward if the run has one."""
    calls = [generate_and_rm(args, sample, sampling_params, evaluation) for sample in group]
    done = list(await asyncio.gather(*calls))
    grades_groups = rollout_context().responder.grader.args.group_rm
    if grades_groups and all(sample.status in _DONE for sample in done):
        for sample, reward in zip(done, await batched_async_rm(args, done), strict=True):
            sample.reward = reward
    return done


async def async_rm(args: object, sample: SlimeSample, **kwargs: object) -> float | None:
    """The run's reward of a sample. If its function fails, the sample becomes FAILED, with the
    reason in its metadata, and the result is None."""
    (reward,) = await batched_async_rm(args, [sample])
    return reward


async def batched_async_rm(
    args: object, samples: Sequence[SlimeSample], **kwargs: object
) -> list[float | None]:
    """Rewards of several samples; with --group-rm they form a group."""
    context = rollout_context()
    name, slime_args, tokenizer = _in(context)
    ours = [
        from_slime(s, empty_sample(s, name), s.engine_outputs, slime_args, tokenizer, flag=name)
        for s in samples
    ]
    graded = await context.responder.grade([replace(sample, reward=None) for sample in ours])
    for sample, result in zip(samples, graded, strict=True):
        if result.status == SampleStatus.FAILED:
            sample.status = SlimeSample.Status.FAILED
            sample.metadata = dict(result.metadata)
        refuse_token_rewards(result)
    return [result.reward for result in graded]


class _DataSourceGroups:
    """Adapts a user's data source to the group source of a `Collector`."""

    def __init__(self, data_source: DataSource, context: RolloutContext) -> None:
        self.num_waiting = 0
        self._data_source = data_source
        self._context = context

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]:
        """Take groups from the data source, which makes the choice itself. Raises ValueError if it
        returns other groups than requested."""
        groups = self._data_source.get_samples(count)
        size = self._context.config.rollout.n_samples_per_prompt
        sizes = [len(group) for group in groups]
        if sizes != [size] * count:
            raise ValueError(
                f"data_source.get_samples({count}) returned {len(sizes)} groups of "
                f"{sorted(set(sizes))} samples; --n-samples-per-prompt is {size}"
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

    def observe(self, groups: Sequence[PendingGroup]) -> None:
        """A user's data source learns nothing here."""

    def metrics(self) -> dict[str, float]:
        return {}

    def _pending(self, group: Group) -> PendingGroup:
        samples = tuple(_from_unfinished(sample, *_in(self._context)) for sample in group)
        first = samples[0]
        tokens = tuple(first.tokens[: first.prompt_length].tolist())
        prompt = Prompt(first.group_id, first.text, tokens, first.label, first.metadata)
        return PendingGroup(prompt, samples)


def generate_rollout(
    args: SlimeArgs, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The rollout of a run without a custom function, for functions that wrap it: with
    over-sampling, filters, and unfinished samples. Must not be called from within an event loop."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    context = rollout_context()
    responder = context.responder
    config = context.config
    collector = Collector(
        config.scheduling,
        config.rollout,
        context.rollouter,
        _DataSourceGroups(data_source, context),
        responder.sampling,
        replace(group_filters(config), removed_samples=None),
        max_failed=config.guards.max_failed_samples,
    )
    with StreamGeneration(responder, args.rollout_time_limit_s) as generation:
        collected = collector.collect_from(generation, rollout_id, decide_locally)
    groups = [_to_slime(complete(group.samples)) for group in collected.groups]
    if args.rollout_sample_filter_path is not None:  # this sets remove_sample
        load_function(args.rollout_sample_filter_path, SAMPLE_FILTER)(context.args, groups)
    metrics = {name.removeprefix("rollout/"): value for name, value in collected.metrics.items()}
    return RolloutFnTrainOutput(groups, metrics)


async def eval_rollout(args: SlimeArgs, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Evaluate the run's evaluation sets, like a run without a custom function."""
    context = rollout_context()
    evaluator = context.evaluator
    responder = context.responder
    if evaluator is None:
        raise ValueError(
            f"{context.name}: eval_rollout needs evaluation sets (--eval-prompt-data or "
            "--eval-config, with --eval-interval)"
        )
    data = {}
    grader = responder.grader
    for each in evaluator.sets:
        size = each.n_samples_per_eval_prompt
        groups = [_samples_of(prompt, size) for prompt in evaluator.prompts[each.name]]
        parameters = sampling_dict(evaluator.sampling(each))
        calls = [generate_and_rm_group(args, g, parameters, evaluation=True) for g in groups]
        responder.purpose = f"eval/{each.name}"
        responder.grader = evaluator.grader(each.name) or grader
        try:
            await asyncio.gather(*calls)
        finally:
            responder.grader = grader
        samples = list(chain.from_iterable(groups))
        data[each.name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == SlimeSample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data), []


def _samples_of(prompt: Prompt, size: int) -> Group:
    """Samples of an evaluation prompt, before their first token."""
    group_id = prompt.group_id
    first = prompt.group_id * size
    return [
        SlimeSample(
            group_id, index, prompt.text, label=prompt.label, metadata=dict(prompt.metadata)
        )
        for index in range(first, first + size)
    ]


def _to_slime(samples: Sequence[Sample]) -> Group:
    return [to_slime_with_output(sample) for sample in samples]


def _from_unfinished(
    sample: SlimeSample, flag: str, args: SlimeArgs, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    """Convert to our sample type, keeping it unfinished so that it may continue."""
    empty = empty_sample(sample, flag)
    if sample.response_length:
        outputs = sample.engine_outputs
        return from_slime(sample, empty, outputs, args, tokenizer, flag=flag, allow_unfinished=True)
    tokens = sample.tokens or prompt_tokens(sample, tokenizer)
    return replace(empty, tokens=torch.tensor(tokens, dtype=torch.int64))


def _in(context: RolloutContext) -> tuple[str, SlimeArgs, PreTrainedTokenizerBase]:
    return context.name, context.args, context.rollouter.tokenizer


def _unfinished(sample: SlimeSample, context: RolloutContext) -> Sample:
    """`_from_unfinished`, for a sample to generate: unfinished, even if it is FAILED."""
    return replace(_from_unfinished(sample, *_in(context)), status=SampleStatus.PARTIAL)


def _overwrite(sample: SlimeSample, ours: Sample) -> SlimeSample:
    """Overwrite `sample` with the content of `ours`."""
    converted = to_slime_with_output(ours)
    for field in fields(SlimeSample):
        setattr(sample, field.name, getattr(converted, field.name))
    return sample
