"""The episodes of --fully-async with servers: an event loop in a thread of rank 0, in which they go
on while the trainer works and between two rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as LateError
from dataclasses import replace

from slime_like.data.group_buffer import PendingGroup
from slime_like.engines.base import SamplingParams
from slime_like.rollout.pausable_requests import PausableRequests
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.streaming import ABORT_S, Responder
from slime_like.samples.episodes import complete
from slime_like.types import Sample, T


class PoolResponder(Responder):
    """A `Responder` whose requests and rewards wait while the pool is paused, and which knows the
    samples of unfinished groups."""

    def __init__(
        self, rollouter: Rollouter, requests: PausableRequests, sampling: SamplingParams
    ) -> None:
        super().__init__(rollouter, requests, sampling)
        # by id, until `forget`; perhaps without the reward
        self.ended: dict[int, Sample] = {}
        self._requests = requests
        self._at_work = 0  # rewards and hooks
        self._is_idle = asyncio.Event()

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool = False
    ) -> Sample:
        """See `Responder`."""
        done = await super().respond(sample, sampling, evaluation=evaluation)
        self.ended[done.sample_id] = done
        return done

    async def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """See `Responder`."""
        self.ended |= {sample.sample_id: sample for sample in samples}
        await self._requests.until_open()
        with self._working():
            return await super().grade(samples)

    async def with_hook(self, sample: Sample, *, evaluation: bool) -> Sample:
        """See `Responder`. A checkpoint waits for it: the sample is neither a request now nor
        among the ended ones."""
        with self._working():
            return await super().with_hook(sample, evaluation=evaluation)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._is_idle.set()

    async def until_idle(self) -> None:
        """Wait until no reward is being computed, and no hook runs."""
        while self._at_work:
            self._is_idle.clear()
            await self._is_idle.wait()

    def current(self, group: PendingGroup) -> PendingGroup:
        """The group with the tokens that its unfinished samples have so far. What a user function
        or an agent has begun is not part of it: its episode starts again."""
        outputs = {}
        if self.rollouter.custom_generate is None:
            outputs = {each.request.sample_id: each.output for each in self._requests.unfinished}

        def of(sample: Sample) -> Sample:
            output = outputs.get(sample.sample_id)
            if output is None or not output.tokens:
                return self.ended.get(sample.sample_id, sample)
            paused = replace(output, finish_reason="abort")
            return self.rollouter.append_output(sample, paused, self.sampling)

        return group.with_samples(map(of, complete(group.samples)))

    def forget(self, group: PendingGroup) -> None:
        """The group has ended."""
        for sample in group.samples:
            self.ended.pop(sample.sample_id, None)


class PoolThread:
    """Runs episodes until they end. `call`, `pause`, `resume` and `close` belong to other threads,
    everything else to the loop."""

    def __init__(
        self,
        rollouter: Rollouter,
        sampling: SamplingParams,
        *,
        start: Callable[[], list[PendingGroup]],
        finish: Callable[[PendingGroup], None],
    ) -> None:
        """
        Args:
            rollouter: The run's.
            sampling: Sampling parameters of training.
            start: Called in the loop for the groups to start now.
            finish: Called in the loop with every group that has ended, graded.
        """
        self._requests = PausableRequests(rollouter.engine, rollouter.tokenizer)
        self.responder = PoolResponder(rollouter, self._requests, sampling)
        self._start = start
        self._finish = finish
        self._tasks = set[asyncio.Task[None]]()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._paused = False
        self._loop = asyncio.new_event_loop()
        if rollouter.custom_generate is not None:
            rollouter.custom_generate.loop = self._loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Await `work()` in the loop; returns its result or raises its error."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout_s)

    def pause(self) -> None:
        """Stop all requests and rewards; they keep what they have. Returns when engine and graders
        are idle."""

        async def pause() -> None:
            self._paused = True
            await self._requests.pause()
            await asyncio.sleep(0)  # requests that have just ended come to their hooks
            await self.responder.until_idle()

        self.call(pause)

    def resume(self) -> None:
        """Continue after `pause`, and start what may start now."""

        async def resume() -> None:
            self._paused = False
            self._requests.resume()
            self.fill()

        self.call(resume)

    def run(self, groups: Sequence[PendingGroup]) -> None:
        """Let these groups' episodes begin or continue."""
        for group in groups:
            task = self._loop.create_task(self._respond(group))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def fill(self) -> None:
        """Start the groups that may start now."""
        if not self._paused and self._error is None:
            self.run(self._start())

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is asked whenever a group has ended. Raises the first error of
        an episode."""
        while True:
            if self._error is not None:
                raise self._error
            if ready():
                return
            self._changed.clear()
            await self._changed.wait()

    async def _respond(self, group: PendingGroup) -> None:
        responder = self.responder
        samples = await responder.respond_group(complete(group.samples), responder.sampling)
        # at once, so that no checkpoint comes between: it would have the group without its end
        self._finish(group.with_samples(samples))
        responder.forget(group)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        try:
            task.result()
            self.fill()
        except BaseException as error:
            self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        """Abort the episodes that are left, and end the thread. May be called twice."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._paused = True
            await self._requests.abort()
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=ABORT_S)
            await self._requests.leave_loop()

        with contextlib.suppress(LateError, RuntimeError):
            self.call(end, 2 * ABORT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ABORT_S)
        if not self._thread.is_alive():
            self._loop.close()
