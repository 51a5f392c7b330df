"""slime's functions for a rollout of one's own: those of ``slime.rollout.sglang_rollout``,
``slime.rollout.rm_hub`` and
``slime.rollout.base_types``, over whichever engine the run has. Import them from `slime_api.py`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from slime_like.compat.slime.requests import sampling_dict, sampling_of
from slime_like.compat.slime.results import blank, from_slime, whole
from slime_like.compat.slime.rollout_context import RolloutContext, function_call
from slime_like.compat.slime.samples import SlimeSample, to_slime
from slime_like.rollout.collection_stats import CollectionStats
from slime_like.rollout.engines.base import GenerateRequest
from slime_like.rollout.episode import Model
from slime_like.rollout.filters import DynamicFilter, samples_to_remove
from slime_like.types import Sample, SampleStatus

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
    """data: by the name of an evaluation set, {"rewards": [...], "truncated": [...], "samples":
    [...]}; the last two may be left out."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Wait for it in an event loop of its own, as ``slime.utils.async_utils.run``."""
    return asyncio.run(coroutine)


async def generate(
    args: Any, sample: SlimeSample, sampling_params: Mapping[str, Any]
) -> SlimeSample:
    """Let the engine finish the sample, which is changed and returned. It is PENDING or ABORTED
    after an abort, and goes on when asked again."""
    call = function_call()
    sampling = sampling_of(sampling_params, call.sampling)
    ours = _open(sample, call)
    if ours.response_length >= sampling.max_new_tokens:
        return _take(sample, replace(ours, status=SampleStatus.TRUNCATED))
    request = GenerateRequest(
        ours.sample_id,
        tuple(ours.tokens.tolist()),
        call.seed_of(ours.sample_id, ours.response_length),
    )
    output = await call.generate_one(
        request, replace(sampling, max_new_tokens=sampling.max_new_tokens - ours.response_length)
    )
    return _take(sample, call.rollouter.written(ours, output, sampling))


async def generate_and_rm(
    args: Any, sample: SlimeSample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> SlimeSample:
    """`generate`, or --custom-generate-function-path; then the reward, except one of whole groups. A
    finished sample stays as it is."""
    call = function_call()
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in _DONE or call.aborted:
        return sample
    custom = call.rollouter.custom_generate
    if custom is None:
        await generate(args, sample, sampling_params)
    else:
        model = Model(
            call,
            call.rollouter.tokenizer,
            sampling_of(sampling_params, call.sampling),
            call.seed_of,
        )
        _take(
            sample,
            await custom.make(
                _open(sample, call), model, call, call.seed_of, evaluation=evaluation
            ),
        )
    if call.out_of_time and sample.status not in _DONE:
        _end_here(args, sample)
    if not call.grades_groups and sample.reward is None and sample.status in _DONE:
        sample.reward = await async_rm(args, sample)
    return sample


async def generate_and_rm_group(
    args: Any, group: Group, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Group:
    """All samples of a group, with a reward of the whole group where the run has one."""
    done = list(
        await asyncio.gather(
            *(generate_and_rm(args, sample, sampling_params, evaluation) for sample in group)
        )
    )
    if function_call().grades_groups and all(sample.status in _DONE for sample in done):
        for sample, reward in zip(done, await batched_async_rm(args, done), strict=True):
            sample.reward = reward
    return done


def _end_here(args: Any, sample: SlimeSample) -> None:
    """A response that --rollout-time-limit-s cut short: as if it had reached its largest length, or
    lost where it has not begun."""
    if sample.response_length:
        sample.status = SlimeSample.Status.TRUNCATED
    else:
        sample.status = SlimeSample.Status.ABORTED
        sample.metadata.setdefault(
            "failure", f"no token within --rollout-time-limit-s {args.rollout_time_limit_s:g}"
        )


async def async_rm(args: Any, sample: SlimeSample, **more: Any) -> float | None:
    """The run's reward. Where its function fails the sample is FAILED, with the reason in its
    metadata, and the answer None."""
    (reward,) = await _grade([sample])
    return reward


async def batched_async_rm(
    args: Any, samples: Sequence[SlimeSample], **more: Any
) -> list[float | None]:
    """Rewards of several samples; with --group-rm they are a group."""
    return await _grade(samples)


async def _grade(samples: Sequence[SlimeSample]) -> list[float | None]:
    call = function_call()
    ours = [
        from_slime(
            s, blank(s, call.flag), s.written, call.args, call.rollouter.tokenizer, flag=call.flag
        )
        for s in samples
    ]
    graded = await call.grade([replace(sample, reward=None) for sample in ours])
    for sample, answer in zip(samples, graded, strict=True):
        if answer.status == SampleStatus.FAILED:
            sample.status, sample.metadata = SlimeSample.Status.FAILED, dict(answer.metadata)
        if answer.token_rewards is not None:
            raise ValueError(
                f"{call.flag}: sample {sample.index} was given a reward for each token, and a sample of a rollout function "
                "carries one number; add --sum-token-rewards"
            )
    return [answer.reward for answer in graded]


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """What a run without a function of its own does, to be wrapped by one: over-sampling, the
    filters, and what is not finished."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    output, unfinished = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if unfinished:
        data_source.add_samples(unfinished)
    return output


async def generate_rollout_async(
    args: Any, rollout_id: int, get_samples: Callable[[int], list[Group]]
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """The groups of a rollout, as soon as there are enough, and those that wait for the next one
    (--partial-rollout); the rest is aborted. Raises ValueError when --max-num-gen-batches draws
    bring too few."""
    call, tally, late = (
        function_call(),
        CollectionStats(),
        0,
    )  # late: groups that --rollout-time-limit-s cut short
    wanted, draw = args.rollout_batch_size, args.over_sampling_batch_size or args.rollout_batch_size
    chosen = DynamicFilter(args.dynamic_sampling_filter_path, call.args)
    kept: list[Group] = []
    pending: set[asyncio.Task[Group]] = set()
    under_way, deadline = 0, math.inf
    while len(kept) < wanted:
        while under_way < wanted:
            if tally.draws == args.max_num_gen_batches:
                raise ValueError(
                    tally.too_few(rollout_id, chosen, kept=len(kept), wanted=wanted, draw_size=draw)
                )
            groups = get_samples(draw)
            under_way += len(groups)
            tally.draws, tally.drawn = tally.draws + 1, tally.drawn + len(groups)
            tally.resumed += sum(
                any(sample.response_length for sample in group) for group in groups
            )
            call.aborted = call.out_of_time = False
            deadline = time.monotonic() + (args.rollout_time_limit_s or math.inf)
            pending |= {
                asyncio.ensure_future(
                    generate_and_rm_group(args, group, sampling_dict(call.sampling))
                )
                for group in groups
            }
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        done, pending = await asyncio.wait(
            pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:  # what is not finished ends where it is
            call.out_of_time, deadline, late = True, math.inf, late + len(pending)
            await call.abort()
        for group in sorted((task.result() for task in done), key=_index):
            keep = chosen.keeps(group, is_spare=under_way > wanted)
            under_way -= not keep
            if keep and len(kept) < wanted:
                kept.append(group)
                continue
            tally.surplus += keep
            tally.wasted_tokens += _tokens([group])
    unfinished = await _abort(call, pending) if pending else []
    kept.sort(key=_index)
    samples_to_remove(args.rollout_sample_filter_path, call.args, kept)  # which marks them
    waiting = unfinished if args.partial_rollout else []
    if not args.partial_rollout:
        tally.lost, tally.wasted_tokens = len(unfinished), tally.wasted_tokens + _tokens(unfinished)
    metrics = tally.metrics(chosen.dropped, kept=len(kept), waiting=len(waiting), groups_late=late)
    return RolloutFnTrainOutput(kept, metrics), waiting


def _tokens(groups: Sequence[Group]) -> int:
    return sum(sample.response_length for group in groups for sample in group)


async def _abort(call: RolloutContext, pending: set[asyncio.Task[Group]]) -> list[Group]:
    """The groups that are not finished, as far as they are."""
    await call.abort()
    groups = sorted(await asyncio.gather(*pending), key=_index)
    for sample in (sample for group in groups for sample in group if sample.response_length):
        sample.metadata.setdefault("start_rollout_id", call.rollout_id)
    return groups


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """The evaluation sets of the run, as a run without a function of its own evaluates them."""
    call = function_call()
    if call.evaluator is None:
        raise ValueError(
            f"{call.flag}: eval_rollout needs evaluation sets (--eval-prompt-data or --eval-config, with --eval-interval)"
        )
    data = {}
    for each in call.evaluator.sets:
        call.purpose = f"eval/{each.name}"
        sampling, n = call.evaluator.sampling(each), each.n_samples_per_eval_prompt
        groups = [
            [
                SlimeSample(
                    p.group_id, p.group_id * n + j, p.text, label=p.label, metadata=dict(p.metadata)
                )
                for j in range(n)
            ]
            for p in call.evaluator.prompts[each.name]
        ]
        parameters = sampling_dict(sampling)
        with call.grading(call.evaluator.grader(each.name)):
            await asyncio.gather(
                *(
                    generate_and_rm_group(args, group, parameters, evaluation=True)
                    for group in groups
                )
            )
        samples = [sample for group in groups for sample in group]
        truncated = [sample.status == SlimeSample.Status.TRUNCATED for sample in samples]
        data[each.name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": truncated,
            "samples": samples,
        }
    return RolloutFnEvalOutput(data), []


def _index(group: Group) -> int:
    index = group[0].index
    assert index is not None
    return index


def _open(sample: SlimeSample, call: RolloutContext) -> Sample:
    """As a sample of ours that may go on."""
    ours = blank(sample, call.flag)
    if sample.response_length:
        return from_slime(
            sample,
            ours,
            sample.written,
            call.args,
            call.rollouter.tokenizer,
            flag=call.flag,
            may_go_on=True,
        )
    tokens = (
        sample.tokens
        or call.rollouter.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    )
    return replace(ours, tokens=torch.tensor(tokens, dtype=torch.int64))


def _take(sample: SlimeSample, ours: Sample) -> SlimeSample:
    """`sample`, changed into what `ours` is."""
    found = to_slime(ours)
    for each in fields(SlimeSample):
        setattr(sample, each.name, getattr(found, each.name))
    sample.written = [whole(ours)]
    return sample
