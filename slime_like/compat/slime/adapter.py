"""slime's conventions for user functions in rollouts: a `rollout.hooks.FunctionAdapter` that calls
each function as slime does, and validates its result."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from arguments.run_config import RunConfig
from slime_like.batching.turn_credit import keep_record
from slime_like.compat.slime.requests import call_slime_function
from slime_like.compat.slime.rollout import generate_rollout
from slime_like.compat.slime.rollout_function import RolloutFunction
from slime_like.compat.slime.samples import (
    as_output,
    from_slime,
    raising,
    slime_args,
    to_slime,
    to_slime_groups,
)
from slime_like.compat.slime.user_source import SlimeUserSource
from slime_like.data.group_buffer import ChooseWaiting, GroupBuffer, PendingGroup
from slime_like.rollout.episode import Model, Respond, SampleHook
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.filters import DynamicFilterOutput, KeepGroup
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import AnySample
from slime_like.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Function = Callable[..., Any]


class SlimeAdapter:
    """See `FunctionAdapter`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._args = slime_args(config)

    def dynamic_filter(self, function: Function, name: str) -> KeepGroup:
        """Adapt ``function(args, samples)``, which returns a bool or a DynamicFilterOutput."""

        def keep_group(samples: Sequence[AnySample]) -> DynamicFilterOutput:
            place = f"{name}: group {samples[0].group_id}"
            with raising(place):
                output = function(self._args, [to_slime(sample) for sample in complete(samples)])
            if isinstance(output, bool):
                return DynamicFilterOutput(keep=output)
            keep = getattr(output, "keep", None)
            if keep is None or getattr(keep, "shape", ()) != ():
                raise ValueError(
                    f"{place}: the function returned {type(output).__name__}; return True, False "
                    "or a DynamicFilterOutput(keep, reason)"
                )
            reason = getattr(output, "reason", None)
            fallback = bool(getattr(output, "keep_when_insufficient", False))
            return DynamicFilterOutput(bool(keep), reason, fallback)

        return keep_group

    def buffer_filter(self, function: Function, name: str) -> ChooseWaiting:
        """Adapt ``function(args, rollout_id, buffer, num_samples)``, which removes groups from the
        list and returns those that continue; other removed groups are dropped."""

        def choose(
            rollout_id: int, waiting: Sequence[PendingGroup], count: int
        ) -> tuple[list[int], list[int]]:
            buffer = to_slime_groups(complete(group.samples) for group in waiting)
            before = [group.group_id for group in waiting]
            taken = function(self._args, rollout_id, buffer, count)
            ids = [group[0].group_index for group in taken]
            if len(ids) > count or len(set(ids)) < len(ids) or not set(ids) <= set(before):
                raise ValueError(
                    f"{name}: returned groups {ids}, must be at most {count} of {before}"
                )
            remaining = {group[0].group_index for group in buffer} - set(ids)
            return ids, [i for i in before if i not in remaining and i not in ids]

        return choose

    def sample_filter(
        self, function: Function, name: str
    ) -> Callable[[Sequence[SampleGroup]], list[int]]:
        """Adapt ``function(args, groups)``, which sets `remove_sample` of samples."""

        def removed_samples(groups: Sequence[SampleGroup]) -> list[int]:
            converted = to_slime_groups(complete(group.samples) for group in groups)
            function(self._args, converted)
            samples = chain.from_iterable(converted)
            return [s.index for s in samples if s.remove_sample and s.index is not None]

        return removed_samples

    def custom_generate(self, function: Function) -> Respond:
        """Adapt ``async function(args, sample, sampling_params)``, optionally with
        ``evaluation``."""
        takes_evaluation = "evaluation" in inspect.signature(function).parameters

        async def respond(sample: Sample, model: Model, evaluation: bool) -> Sample:
            options = {"evaluation": evaluation} if takes_evaluation else {}
            return await call_slime_function(function, self._args, sample, model, **options)

        return respond

    def sample_hook(self, functions: Sequence[tuple[str, Function]]) -> SampleHook:
        """Adapt functions ``(args, sample, *, rollout_id, evaluation)``, async or not; both
        keywords are optional. Each function receives the result of the previous one."""

        async def apply_hooks(
            sample: Sample,
            tokenizer: PreTrainedTokenizerBase,
            rollout_id: int | None,
            evaluation: bool,
        ) -> Sample:
            for name, function in functions:
                options = accepted(function, {"rollout_id": rollout_id, "evaluation": evaluation})
                converted = to_slime(sample)
                with raising(name):
                    result = function(self._args, converted, **options)
                    if inspect.isawaitable(result):
                        result = await result
                result = converted if result is None else result
                outputs = [as_output(sample)]
                changed = from_slime(result, sample, outputs, self._args, tokenizer, flag=name)
                records = (sample.sampling_mask, sample.routed_experts, sample.indexer_topk)
                replays = any(record is not None for record in records)
                if replays and changed.response_length != sample.response_length:
                    raise ValueError(
                        f"{name}: sample {sample.sample_id} has other tokens than the engine "
                        "sampled, but the run replays the engine's routed experts, selected keys "
                        "or sampling masks"
                    )
                (sample,) = keep_record([changed], [sample])
            return sample

        return apply_hooks

    def reward_post_process(
        self, function: Function, name: str
    ) -> Callable[[Sequence[Sample]], list[float]]:
        """Adapt ``function(args, samples) -> (raw_rewards, rewards)``, with samples in rollout
        order. The raw rewards are ignored, since the run logs its own."""

        def process(samples: Sequence[Sample]) -> list[float]:
            with raising(name):
                result = function(self._args, [to_slime(sample) for sample in samples])
            return _second_list(result, name, len(samples))

        return process

    def rollout_function(
        self,
        function: Function | None,
        name: str,
        rollouter: Rollouter,
        prompts: GroupBuffer | SlimeUserSource | None,
        evaluator: Evaluator | None,
    ) -> RolloutFunction:
        """Adapt ``function(args, rollout_id, data_source, evaluation=False)``; None:
        `generate_rollout`."""
        call = generate_rollout if function is None else function
        return RolloutFunction(call, name, self._config, rollouter, prompts, evaluator)

    def data_source(self, make: Function, name: str) -> SlimeUserSource:
        """Adapt ``Class(args)``, see `SlimeUserSource`."""
        return SlimeUserSource(make, name, self._config)


def accepted(function: Function, values: dict[str, object]) -> dict[str, object]:
    """The values for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _second_list(result: object, name: str, count: int) -> list[float]:
    """The rewards in a function's result (raw_rewards, rewards); None becomes NaN."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{name}: the function returned {type(result).__name__}; return (raw_rewards, rewards)"
        )
    values = result[1].tolist() if hasattr(result[1], "tolist") else list(result[1])
    if len(values) != count or len(list(result[0])) != count:
        raise ValueError(
            f"{name}: {len(list(result[0]))} raw rewards and {len(values)} rewards; the rollout "
            f"has {count} samples"
        )
    wrong = [v for v in values if v is not None and not isinstance(v, int | float)]
    if wrong:
        raise ValueError(f"{name}: a reward is {type(wrong[0]).__name__}, must be a number")
    return [math.nan if value is None else float(value) for value in values]
