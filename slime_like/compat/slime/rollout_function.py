"""User functions for a whole rollout or evaluation (--rollout-function-path, --eval-function-path),
called as in slime: ``function(args, rollout_id, data_source, evaluation=False)``.

The function runs on rank 0, with a time limit. Its result is validated and kept there; all ranks
get the index of its samples.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.compat.slime.data_source import DataSource
from slime_like.compat.slime.function_results import Expected, read_eval_output, read_train_output
from slime_like.compat.slime.rollout_context import RolloutContext
from slime_like.compat.slime.samples import slime_args
from slime_like.compat.slime.user_source import SlimeUserSource
from slime_like.data.group_buffer import GroupBuffer, PendingGroup
from slime_like.distributed.collectives import from_rank_zero_within
from slime_like.rollout.collector import Collected
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.hooks import group_filters
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.shared_groups import GroupIndex, groups_of_index, index_of_groups
from slime_like.samples.groups import SampleGroup

Result = TypeVar("Result")


class RolloutFunction:
    """Replaces a `Collector`, an `Evaluator`, or both."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        config: RunConfig,
        rollouter: Rollouter,
        prompts: GroupBuffer | SlimeUserSource | None,
        evaluator: Evaluator | None,
    ) -> None:
        """
        Args:
            function: The user's.
            name: The flag and its value, for messages.
            config: The run's.
            rollouter: Of the run.
            prompts: Source of data_source; None if the run samples no prompts, and data_source is
                then None as well.
            evaluator: With the evaluation sets of the run.
        """
        self.name = name
        self.args = slime_args(config)
        self.buffer = prompts if isinstance(prompts, GroupBuffer) else None
        self._source = prompts if isinstance(prompts, SlimeUserSource) else None
        self._function = function
        self._config = config
        self._rollouter = rollouter
        self._evaluator = evaluator
        self._filters = group_filters(config)

    def collect(self, rollout_id: int) -> Collected:
        """Like `Collector.collect`. Raises ValueError if the function does not return
        --rollout-batch-size groups of --n-samples-per-prompt samples, or for a sample with
        inconsistent fields."""
        rollout = self._config.rollout
        rollouter = self._rollouter
        local: list[SampleGroup] = []  # on rank 0

        def read(result: object) -> tuple[GroupIndex, dict[str, float]]:
            expected = Expected(
                self.name,
                self.args,
                rollouter.tokenizer,
                groups=rollout.rollout_batch_size,
                samples=rollout.n_samples_per_prompt,
                vocab_size=self._config.gpt.vocab_size,
                newest_version=rollouter.engine.weight_version,
            )
            groups, metrics = read_train_output(result, expected)
            local.extend(SampleGroup(group[0].group_id, tuple(group)) for group in groups)
            return index_of_groups(local), metrics

        index, metrics = self._call(rollout_id, read, evaluation=False)
        return Collected(local or groups_of_index(index), [], metrics)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Like `Evaluator.evaluate`."""

        def read(result: object) -> dict[str, float]:
            return read_eval_output(result, self.name, self.args, self._rollouter.tokenizer)

        return self._call(rollout_id, read, evaluation=True)

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def _call(
        self, rollout_id: int, read: Callable[[object], Result], *, evaluation: bool
    ) -> Result:
        """Call the function; returns `read` of its result on all ranks, and synchronises the
        position in the prompts. Raises ValueError if the function raises or returns an invalid
        result, RunError if it takes too long."""
        what = f"{self.name}: {'evaluation' if evaluation else 'rollout'} {rollout_id + 1}"

        def work() -> tuple[Result, Mapping[str, Any] | None]:
            with RolloutContext(
                self.name,
                self._config,
                self.args,
                self._rollouter,
                training_sampling(self._config.rollout),
                self._evaluator,
                rollout_id=rollout_id,
            ):
                source = self._data_source(rollout_id)
                try:
                    result = self._function(self.args, rollout_id, source, evaluation=evaluation)
                except Exception as error:
                    raise ValueError(f"{what}: {_where(error)}") from error
            position = None
            if self.buffer is not None:
                position = self.buffer.source.state_dict()
            return read(result), position

        timeout_s = self._config.scheduling.rollout_function_timeout_s
        late = f"{what} took longer than --rollout-function-timeout-s {timeout_s:g}"
        value, position = from_rank_zero_within(
            work, self._rollouter.group, timeout_s=timeout_s, late=late
        )
        if position is not None and self.buffer is not None and dist.get_rank() != 0:
            self.buffer.source.load_state_dict(position)
            self.buffer.waiting = []  # they are on rank 0
        return value

    def _data_source(self, rollout_id: int) -> object:
        """The function's data source, on rank 0."""
        if self._source is not None:
            return self._source.data_source
        if self.buffer is None:
            return None

        def choose(waiting: Sequence[PendingGroup], count: int) -> tuple[list[int], list[int]]:
            return self._filters.choose_waiting(rollout_id, waiting, count)

        return DataSource(self.buffer, choose, self.args, self._rollouter.tokenizer, self.name)


def _where(error: Exception) -> str:
    """An error of a user's function, with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename}, line {last.lineno}, in {last.name}"
    return f"the function raised {type(error).__name__}: {error} ({where})"
