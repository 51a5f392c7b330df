"""Functions of the user's that make a whole rollout, or a whole evaluation
(--rollout-function-path, --eval-function-path), as slime calls them:
``function(args, rollout_id, data_source, evaluation=False)``.

The function runs on rank 0, within a deadline; what it returns is checked there, and then all ranks
have it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.compat.slime.data_source import DataSource
from slime_like.compat.slime.function_results import Expected, read_eval_output, read_train_output
from slime_like.compat.slime.results import blank
from slime_like.compat.slime.rollout import generate_rollout
from slime_like.compat.slime.rollout_context import RolloutContext
from slime_like.compat.slime.samples import SlimeSample, slime_args
from slime_like.distributed.collectives import from_rank_zero_within
from slime_like.import_utils import load_function
from slime_like.rollout.collector import Collected
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.filters import choose_waiting
from slime_like.rollout.group_buffer import GroupBuffer
from slime_like.rollout.rollouter import Rollouter, from_plain, to_plain, training_sampling
from slime_like.types import SampleGroup


class RolloutFunction:
    """One of them. path None: slime's own. buffer: what data_source reads; None where the run
    samples no prompts, and data_source is then None too."""

    def __init__(
        self,
        path: str | None,
        flag: str,
        run: RunConfig,
        rollouter: Rollouter,
        buffer: GroupBuffer | None,
        evaluator: Evaluator | None,
    ) -> None:
        self.name = flag if path is None else f"{flag} {path}"
        self.flag = flag
        self.args = slime_args(run)
        self.function: Callable[..., Any] = (
            generate_rollout if path is None else load_function(path, flag)
        )
        self.rollouter = rollouter
        self.buffer = buffer
        self.evaluator = evaluator
        self.sampling = training_sampling(run.rollout)
        self.timeout_s = run.scheduling.rollout_function_timeout_s
        self.buffer_filter = run.scheduling.buffer_filter_path

    def call(self, rollout_id: int, read: Callable[[Any], Any], *, evaluation: bool) -> Any:
        """`read` of what the function returns, on all ranks, which also have the new position of the
        prompts. Raises ValueError for a function
        that raises or returns something wrong, RunError for one that takes too long."""

        what = f"{self.name}: {'evaluation' if evaluation else 'rollout'} {rollout_id + 1}"

        def work() -> tuple[Any, Any, Any]:
            source = self._data_source(rollout_id)
            with RolloutContext(
                self.flag,
                self.args,
                self.rollouter,
                self.sampling,
                self.evaluator,
                rollout_id=rollout_id,
            ):
                try:
                    result = self.function(self.args, rollout_id, source, evaluation=evaluation)
                except Exception as error:
                    if self.function is generate_rollout:
                        raise
                    raise ValueError(f"{what}: {told(error)}") from error
            position = (
                None
                if self.buffer is None
                else (self.buffer.source.state_dict(), self.buffer.state_dict())
            )
            return read(result), position, dist.get_rank()

        late = f"{what} took longer than --rollout-function-timeout-s {self.timeout_s:g}"
        answer, position, rank = from_rank_zero_within(
            work, self.rollouter.group, timeout_s=self.timeout_s, late=late
        )
        if position is not None and self.buffer is not None and dist.get_rank() != rank:
            self.buffer.source.load_state_dict(position[0])
            self.buffer.load_state_dict(position[1])
        return answer

    def _data_source(self, rollout_id: int) -> DataSource | None:
        if self.buffer is None:
            return None

        def choose(waiting: Sequence[Any], count: int) -> tuple[list[int], list[int]]:
            return choose_waiting(self.buffer_filter, self.args, rollout_id, waiting, count)

        return DataSource(self.buffer, choose, self.args, self.rollouter.tokenizer, self.flag)


class FunctionCollector:
    """In place of a `Collector`: the groups of a rollout as the function makes them. path None:
    slime's own, which aborts what it does not need."""

    def __init__(
        self,
        path: str | None,
        run: RunConfig,
        rollouter: Rollouter,
        buffer: GroupBuffer,
        evaluator: Evaluator | None,
    ) -> None:
        self.buffer = buffer
        self.sampling = training_sampling(run.rollout)
        flag = "the rollout" if path is None else "--rollout-function-path"
        self._function = RolloutFunction(path, flag, run, rollouter, buffer, evaluator)
        self._run = run

    def collect(self, rollout_id: int) -> Collected:
        """Raises ValueError where it returns other groups than --rollout-batch-size of
        --n-samples-per-prompt samples, and for a sample whose parts do not belong together."""
        function, rollout = self._function, self._run.rollout

        def read(result: Any) -> tuple[Any, dict[str, float]]:
            expected = Expected(
                function.name,
                function.args,
                function.rollouter.tokenizer,
                groups=rollout.rollout_batch_size,
                samples=rollout.n_samples_per_prompt,
                vocab_size=self._run.gpt.vocab_size,
                newest_version=function.rollouter.engine.weight_version,
            )
            groups, metrics = read_train_output(result, expected)
            return [
                [(to_plain(s), s.group_id, s.text, s.label) for s in group] for group in groups
            ], metrics

        rows, metrics = function.call(rollout_id, read, evaluation=False)
        return Collected([_group(row) for row in rows], [], metrics)


class FunctionEvaluator:
    """In place of an `Evaluator`: the scores of the sets as the function makes them."""

    def __init__(
        self,
        path: str,
        flag: str,
        run: RunConfig,
        rollouter: Rollouter,
        buffer: GroupBuffer | None,
        evaluator: Evaluator,
    ) -> None:
        self._function = RolloutFunction(path, flag, run, rollouter, buffer, evaluator)
        self._evaluator = evaluator

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """As `Evaluator.evaluate`."""
        function = self._function

        def read(result: Any) -> dict[str, float]:
            return read_eval_output(
                result, function.name, function.args, function.rollouter.tokenizer
            )

        metrics: dict[str, float] = function.call(rollout_id, read, evaluation=True)
        return metrics

    def close(self) -> None:
        self._evaluator.close()


def _group(rows: Sequence[tuple[dict[str, Any], int, str, Any]]) -> SampleGroup:
    """What `to_plain` was made of."""
    samples = []
    for plain, group_id, text, label in rows:
        before = blank(SlimeSample(group_id, plain["sample_id"], text, label=label), "")
        samples.append(from_plain(plain, before))
    return SampleGroup(samples[0].group_id, tuple(samples))


def told(error: Exception) -> str:
    """An error of a user's function, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"the function raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})"
