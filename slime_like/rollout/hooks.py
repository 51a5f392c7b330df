"""User functions in rollouts, named on the command line.

The core uses its own types; an adapter converts them for user functions. slime's conventions
(sample type, argument object, rollout functions) are in `slime_like.compat.slime`, which no core
module imports: it is loaded here by its import path if a flag names a function.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from arguments.rules.scheduling import OWN_ROLLOUT
from arguments.run_config import RunConfig
from slime_like.data.group_buffer import ChooseWaiting, GroupBuffer, oldest_first
from slime_like.distributed.collectives import from_rank_zero
from slime_like.import_utils import load_function, takes_args
from slime_like.rollout.collector import Collected
from slime_like.rollout.episode import (
    CUSTOM_GENERATE,
    CustomGenerate,
    Respond,
    SampleHook,
    play_episode,
)
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.filters import BUILT_IN_FILTERS, DYNAMIC_FILTER, GroupFilters, KeepGroup
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.episodes import complete
from slime_like.samples.exchange import gather_on_rank_zero
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import AnySample
from slime_like.types import Sample

ADAPTER = "slime_like.compat.slime.adapter"
TRAIN_ADAPTER = "slime_like.compat.slime.train_hooks"
BUFFER_FILTER = "--buffer-filter-path"
SAMPLE_FILTER = "--rollout-sample-filter-path"
SAMPLE_HOOK = "--rollout-sample-hook-path"
DATA_SOURCE = "--data-source-path"
POST_PROCESS = "--custom-reward-post-process-path"


class UserRollout(Protocol):
    """A user function that replaces the `Collector`, the `Evaluator`, or both."""

    def collect(self, rollout_id: int) -> Collected: ...

    def evaluate(self, rollout_id: int) -> dict[str, float]: ...

    def close(self) -> None: ...


class UserSource(Protocol):
    """A user's data source, which replaces `PromptSource`. Every method is collective."""

    data_source: object  # the object that rollout functions draw from, on rank 0
    notes: list[str]  # messages to log

    def __len__(self) -> int: ...

    def save(self, rollout_id: int) -> None: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class FunctionAdapter(Protocol):
    """Converts user functions to the core's callables.

    Each method gets an imported function and `name`, the flag with its value, for messages. Invalid
    return values raise ValueError starting with `name`.
    """

    def __init__(self, config: RunConfig) -> None: ...

    def dynamic_filter(self, function: Callable[..., object], name: str) -> KeepGroup: ...

    def buffer_filter(self, function: Callable[..., object], name: str) -> ChooseWaiting: ...

    def sample_filter(
        self, function: Callable[..., object], name: str
    ) -> Callable[[Sequence[SampleGroup]], Collection[int]]: ...

    def custom_generate(self, function: Callable[..., object]) -> Respond: ...

    def sample_hook(self, functions: Sequence[tuple[str, Callable[..., object]]]) -> SampleHook: ...

    def reward_post_process(
        self, function: Callable[..., object], name: str
    ) -> Callable[[Sequence[Sample]], list[float]]: ...

    def rollout_function(
        self,
        function: Callable[..., object] | None,
        name: str,
        rollouter: Rollouter,
        prompts: GroupBuffer | UserSource | None,
        evaluator: Evaluator | None,
    ) -> UserRollout:
        """function: None: the convention's default rollout function, with a user's data source."""
        ...

    def data_source(self, make: Callable[..., object], name: str) -> UserSource: ...


def function_adapter(config: RunConfig) -> FunctionAdapter:
    """The adapter of a run with user functions."""
    adapter: FunctionAdapter = importlib.import_module(ADAPTER).SlimeAdapter(config)
    return adapter


def hook_adapter(config: RunConfig) -> Any:
    """The adapter of training and logging hooks: a `trainer.user_hooks.HookAdapter`."""
    return importlib.import_module(TRAIN_ADAPTER).SlimeHooks(config)


def user_source(config: RunConfig, path: str) -> UserSource:
    """The source of --data-source-path. Collective. Raises ValueError naming the flag."""
    make = load_function(path, DATA_SOURCE)
    return function_adapter(config).data_source(make, f"{DATA_SOURCE} {path}")


def group_filters(config: RunConfig) -> GroupFilters:
    """The filters that the command line names. Raises ValueError naming the flag."""
    dynamic = config.scheduling.dynamic_sampling_filter_path
    buffer = config.scheduling.buffer_filter_path
    sample = config.scheduling.rollout_sample_filter_path
    keep = None if dynamic is None else BUILT_IN_FILTERS.get(dynamic)
    choose: ChooseWaiting = oldest_first
    removed = None
    if dynamic is not None and keep is None:
        function = load_function(dynamic, DYNAMIC_FILTER)
        keep = function_adapter(config).dynamic_filter(function, f"{DYNAMIC_FILTER} {dynamic}")
    if buffer is not None:
        function = load_function(buffer, BUFFER_FILTER)
        choose = function_adapter(config).buffer_filter(function, f"{BUFFER_FILTER} {buffer}")
    if sample is not None:
        function = load_function(sample, SAMPLE_FILTER)
        removed = function_adapter(config).sample_filter(function, f"{SAMPLE_FILTER} {sample}")
    return GroupFilters(keep, choose, removed)


def rollout_function(
    config: RunConfig,
    path: str,
    flag: str,
    rollouter: Rollouter,
    prompts: GroupBuffer | UserSource | None,
    evaluator: Evaluator | None,
) -> UserRollout:
    """Load a user's rollout or evaluation function. Raises ValueError naming the flag."""
    function = load_function(path, flag)
    return function_adapter(config).rollout_function(
        function, f"{flag} {path}", rollouter, prompts, evaluator
    )


def source_rollout(
    config: RunConfig, rollouter: Rollouter, source: UserSource, evaluator: Evaluator | None
) -> UserRollout:
    """Rollouts from a user's data source: by the user's rollout function, or slime's default."""
    path = config.scheduling.rollout_function_path
    if path not in (None, OWN_ROLLOUT):
        return rollout_function(
            config, path, "--rollout-function-path", rollouter, source, evaluator
        )
    name = f"--data-source-path {config.scheduling.data_source_path}"
    return function_adapter(config).rollout_function(None, name, rollouter, source, evaluator)


def custom_generate(config: RunConfig) -> CustomGenerate | None:
    """Load --custom-generate-function-path in either convention: a first parameter named ``args``
    means slime's. None without the flag; raises ValueError naming it."""
    path = config.scheduling.custom_generate_function_path
    if path is None:
        return None
    function = load_function(path, CUSTOM_GENERATE)
    if takes_args(function):
        respond = function_adapter(config).custom_generate(function)
    else:
        respond = play_episode(function)
    timeout_s = config.scheduling.custom_generate_timeout_s
    return CustomGenerate(f"{CUSTOM_GENERATE} {path}", respond, timeout_s=timeout_s)


def sample_hook(config: RunConfig) -> SampleHook | None:
    """Load --rollout-sample-hook-path; None without the flag."""
    paths = config.hooks.rollout_sample_hook_path
    if not paths:
        return None
    functions = [(f"{SAMPLE_HOOK} {path}", load_function(path, SAMPLE_HOOK)) for path in paths]
    return function_adapter(config).sample_hook(functions)


def processed_rewards(config: RunConfig, path: str, samples: Sequence[AnySample]) -> Tensor:
    """Apply --custom-reward-post-process-path in place of normalisation within groups. Collective;
    all samples are gathered on rank 0 for the function.

    Returns:
        [B] float64, equal on all ranks; NaN if a sample has no finite reward or the function
        returns none.

    Raises:
        ValueError: Names the flag, the function and the problem.
    """
    function = load_function(path, POST_PROCESS)
    process = function_adapter(config).reward_post_process(function, f"{POST_PROCESS} {path}")
    complete_samples = gather_on_rank_zero(samples, buffer_size=config.rollout.sample_buffer_size)
    rewards = torch.tensor(
        from_rank_zero(lambda: process(complete(complete_samples))), dtype=torch.float64
    )
    is_finite = torch.tensor([s.reward is not None and math.isfinite(s.reward) for s in samples])
    return torch.where(is_finite & torch.isfinite(rewards), rewards, math.nan)
