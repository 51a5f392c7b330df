"""A call of a user's function that makes a whole rollout: what it reaches the run through, from any
thread and any event loop.

Requests to the engine and rewards have an event loop and a thread of their own here. They end with
the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from slime_like.compat.slime.samples import SlimeArgs
from slime_like.rewards.grader import Grader
from slime_like.rollout.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.seeds import sample_seed
from slime_like.types import Sample

if TYPE_CHECKING:  # which import this
    from slime_like.rollout.evaluate import Evaluator
    from slime_like.rollout.rollouter import Rollouter

ENDED_S = 30.0  # for aborted requests to end


@dataclass(frozen=True, slots=True)
class _ToGrade:
    samples: Sequence[Sample]
    grader: Grader
    answer: Future[list[Sample]]


@dataclass(frozen=True, slots=True)
class _Asked:
    request: GenerateRequest
    sampling: SamplingParams
    future: Future[GenerateOutput]


class RewardExecutor:
    """Rewards, in a thread: what waits together is graded together. The thread stays as long as the
    process, since the reward processes that it starts end with it (`rewards/pool.py`)."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._lock = threading.Lock()
        self._waiting: list[_ToGrade] = []

    def submit(self, samples: Sequence[Sample], grader: Grader) -> Future[list[Sample]]:
        item = _ToGrade(samples, grader, Future())
        with self._lock:
            self._waiting.append(item)
        self._thread.submit(self._grade_waiting)
        return item.answer

    def _grade_waiting(self) -> None:
        with self._lock:
            grader = self._waiting[0].grader if self._waiting else None
            items = [item for item in self._waiting if item.grader is grader]
            self._waiting = [item for item in self._waiting if item.grader is not grader]
        if grader is None:
            return
        try:
            if grader.args.group_rm:
                graded = grader.grade_groups([item.samples for item in items])
            else:
                every = iter(grader.grade([sample for item in items for sample in item.samples]))
                graded = [list(itertools.islice(every, len(item.samples))) for item in items]
        except BaseException as error:
            for item in items:
                item.answer.set_exception(error)
            return
        for item, samples in zip(items, graded, strict=True):
            item.answer.set_result(samples)


class RolloutContext:
    """Open while the function runs, as a context; `function_call` finds it. flag: names the
    function. sampling: of training. evaluator: with the evaluation sets of the run. purpose: as of
    `Rollouter.generate`. aborted: what has not begun does not begin, since there are enough groups,
    or since there is no time left (out_of_time)."""

    def __init__(
        self,
        flag: str,
        args: SlimeArgs,
        rollouter: Rollouter,
        sampling: SamplingParams,
        evaluator: Evaluator | None,
        *,
        rollout_id: int,
    ) -> None:
        self.flag = flag
        self.args = args
        self.rollouter = rollouter
        self.sampling = sampling
        self.evaluator = evaluator
        self.rollout_id = rollout_id
        self.purpose = "train"
        self._grader = rollouter.grader
        self.aborted = False
        self.out_of_time = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout requests", daemon=True
        )
        self._numbers = itertools.count(1)
        self._pending: set[Future[GenerateOutput]] = set()
        self._outbox: list[_Asked] = []
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> RolloutContext:
        global _active
        assert _active is None, "one function at a time"
        self._thread.start()
        self._open = True
        _active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _active
        _active = None
        self._open = False
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(ENDED_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDED_S)
        self._loop.close()

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """As the engine's. What is asked for in one turn of the caller's event loop reaches the
        engine together, so that its batches, and with them the last bits of log-probs, do not
        depend on time. Raises RuntimeError when the function has returned."""
        if not self._open:
            raise RuntimeError(
                "the rollout function has returned: the engine answers only while it runs (see --async-rollout)"
            )
        if self.aborted:
            return GenerateOutput(request.sample_id, (), (), "abort", ())
        future: Future[GenerateOutput] = Future()
        with self._lock:
            self._pending.add(future)
            self._outbox.append(_Asked(request, sampling, future))
            if len(self._outbox) == 1:
                asyncio.get_running_loop().call_soon(self._send)
        future.add_done_callback(self._pending.discard)
        return await asyncio.wrap_future(future)

    def _send(self) -> None:
        with self._lock:
            asked, self._outbox = self._outbox, []
        self._loop.call_soon_threadsafe(
            lambda: [self._loop.create_task(self._answer(item)) for item in asked]
        )

    async def _answer(self, item: _Asked) -> None:
        task = asyncio.current_task()
        assert task is not None

        def given_up(future: Future[GenerateOutput]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        item.future.add_done_callback(given_up)
        try:
            output = await self.rollouter.engine.generate_one(item.request, item.sampling)
        except Exception as error:
            if not item.future.done():
                item.future.set_exception(error)
            return
        if not item.future.done():
            item.future.set_result(output)

    async def abort(self) -> None:
        """End all requests; each returns what it has."""
        self.aborted = True
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self.rollouter.engine.abort(None), self._loop)
        )

    @property
    def grades_groups(self) -> bool:
        """Whether the reward function wants whole groups."""
        return self._grader.args.group_rm

    async def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """With their rewards; together as a group where the reward function wants groups."""
        return await asyncio.wrap_future(_desk.submit(samples, self._grader))

    @contextlib.contextmanager
    def grading(self, grader: Grader | None) -> Iterator[None]:
        """With the rewards of this grader; None: of the run."""
        before, self._grader = self._grader, grader or self._grader
        try:
            yield
        finally:
            self._grader = before

    def seed_of(self, sample_id: int, position: int) -> int:
        """As without a function, so that the same samples are drawn."""
        return sample_seed(self.rollouter.seed, self.purpose, sample_id, position)

    def next_number(self) -> int:
        """In place of the number of a sample, for a request that is of none: below 0, and never
        twice in a run of less than 10^6 in a rollout."""
        return -(self.rollout_id * 10**6 + next(self._numbers))

    async def _end(self) -> None:
        if self._pending:
            await self.rollouter.engine.abort(None)
            await asyncio.wait(
                [asyncio.wrap_future(future) for future in list(self._pending)], timeout=ENDED_S / 2
            )
        await self.rollouter.engine.leave_loop()


_desk = RewardExecutor()
_active: RolloutContext | None = None


def function_call() -> RolloutContext:
    """The call that is running. Raises RuntimeError outside of one."""
    if _active is None:
        raise RuntimeError(
            "the rollout engine is reached from functions named by --rollout-function-path, --eval-function-path or "
            "--custom-generate-function-path only, while they run"
        )
    return _active
