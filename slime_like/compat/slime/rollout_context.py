"""The context of a call of a user's rollout function: gives it access to the run, from any thread
and any event loop.

Requests to the engine run in a separate thread with its own event loop, and end with the call.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from arguments.run_config import RunConfig
from slime_like.compat.slime.samples import SlimeArgs
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.streaming import Responder

END_S = 30.0  # seconds for aborted requests to end


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    request: GenerateRequest
    sampling: SamplingParams
    future: Future[GenerateOutput]


class RolloutContext:
    """Context manager that is active while the function runs, where `rollout_context` returns it.
    It is the engine client of its `responder`."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        args: SlimeArgs,
        rollouter: Rollouter,
        sampling: SamplingParams,
        evaluator: Evaluator | None,
        *,
        rollout_id: int,
    ) -> None:
        """
        Args:
            name: Of the function, for messages.
            config: The run's.
            args: As passed to slime's functions.
            rollouter: Of the run.
            sampling: Of training.
            evaluator: With the evaluation sets of the run.
            rollout_id: 0-based.
        """
        self.name = name
        self.config = config
        self.args = args
        self.rollouter = rollouter
        self.evaluator = evaluator
        self.rollout_id = rollout_id
        self.responder = Responder(rollouter, self, sampling)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout requests", daemon=True
        )
        self._numbers = itertools.count(1)
        self._pending: set[Future[GenerateOutput]] = set()
        self._outbox: list[_PendingRequest] = []
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> RolloutContext:
        global _active
        assert _active is None, "one function at a time"
        self._thread.start()
        self._open = True
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        _active = None
        self._open = False
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        self._loop.close()

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Like the engine's. Requests of one iteration of the caller's event loop reach the engine
        together, so that its batches, and with them the last bits of log-probs, do not depend on
        timing. Raises RuntimeError if the function has returned."""
        if not self._open:
            raise RuntimeError(
                "the rollout function has returned; the engine can only be used while it runs (see "
                "--async-rollout)"
            )
        future: Future[GenerateOutput] = Future()
        with self._lock:
            self._pending.add(future)
            self._outbox.append(_PendingRequest(request, sampling, future))
            if len(self._outbox) == 1:
                asyncio.get_running_loop().call_soon(self._send)
        future.add_done_callback(self._pending.discard)
        return await asyncio.wrap_future(future)

    def _send(self) -> None:
        with self._lock:
            pending = self._outbox
            self._outbox = []
        self._loop.call_soon_threadsafe(
            lambda: [self._loop.create_task(self._execute(item)) for item in pending]
        )

    async def _execute(self, item: _PendingRequest) -> None:
        task = asyncio.current_task()
        assert task is not None

        def propagate_cancel(future: Future[GenerateOutput]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        item.future.add_done_callback(propagate_cancel)
        try:
            output = await self.rollouter.engine.generate_one(item.request, item.sampling)
        except Exception as error:
            if not item.future.done():
                item.future.set_exception(error)
            return
        if not item.future.done():
            item.future.set_result(output)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        """Like the engine's."""
        ended = asyncio.run_coroutine_threadsafe(
            self.rollouter.engine.abort(sample_ids), self._loop
        )
        await asyncio.wrap_future(ended)

    async def leave_loop(self) -> None:
        """Nothing to do: no resources belong to the caller's loop."""

    def next_number(self) -> int:
        """A negative id for a request without a sample; unique in the run for fewer than 10^6 such
        requests per rollout."""
        return -(self.rollout_id * 10**6 + next(self._numbers))

    async def _end(self) -> None:
        if self._pending:
            await self.rollouter.engine.abort(None)
            await asyncio.wait(
                [asyncio.wrap_future(future) for future in list(self._pending)], timeout=END_S / 2
            )
        await self.rollouter.engine.leave_loop()


_active: RolloutContext | None = None


def rollout_context() -> RolloutContext:
    """The context of the running call. Raises RuntimeError outside of one."""
    if _active is None:
        raise RuntimeError(
            "this can only be called by functions of --rollout-function-path and "
            "--eval-function-path, while they run; a function of --custom-generate-function-path "
            "can use generate, post and GenerateState, and the run computes the reward of what it "
            "returns, unless it sets sample.reward"
        )
    return _active
