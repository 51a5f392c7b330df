"""Dynamic batching: single requests (of agents and the Tinker server) are decoded in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams

PAUSED_POLL_S = 0.002


# (requests, sampling, aborted sample ids) -> after every token, newly finished outputs by index
Decode = Callable[
    [Sequence[GenerateRequest], SamplingParams, Collection[int]],
    Iterator[dict[int, GenerateOutput]],
]


# (requests, sampling) -> how many of them to decode together
BatchSize = Callable[[Sequence[GenerateRequest], SamplingParams], int]


# whether two requests can be decoded in one batch
Together = Callable[[GenerateRequest, GenerateRequest], bool]


def _any(first: GenerateRequest, other: GenerateRequest) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    request: GenerateRequest
    sampling: SamplingParams
    output: asyncio.Future[GenerateOutput]


class Batcher:
    """Decodes one batch at a time, of at most `batch_size` requests with equal sampling parameters.
    Requests that arrive during a batch wait for it to finish."""

    def __init__(
        self,
        decode: Decode,
        batch_size: BatchSize,
        token_lock: threading.Lock,
        together: Together = _any,
    ) -> None:
        """
        Args:
            token_lock: Held while computing a token and while replacing weights.
            together: Limits which requests share a batch.
        """
        self.paused = False
        self._decode = decode
        self._batch_size = batch_size
        self._waiting: deque[_PendingRequest] = deque()
        self._running: list[_PendingRequest] = []
        self._aborted: set[int] = set()
        self._pump: asyncio.Task[None] | None = None
        self._token_lock = token_lock
        self._together = together

    async def submit(self, request: GenerateRequest, sampling: SamplingParams) -> GenerateOutput:
        loop = asyncio.get_running_loop()
        if self._pump is None or self._pump.done() or self._pump.get_loop() is not loop:
            self._waiting.clear()  # left by an event loop that has ended
            self._pump = loop.create_task(self._serve())
        pending = _PendingRequest(request, sampling, loop.create_future())
        self._waiting.append(pending)
        try:
            return await pending.output
        except asyncio.CancelledError:
            self.abort([request.sample_id])
            raise

    def abort(self, sample_ids: Collection[int] | None) -> None:
        """Abort requests: running ones after the next token, waiting ones at once, without
        output."""

        def matches(pending: _PendingRequest) -> bool:
            return sample_ids is None or pending.request.sample_id in sample_ids

        self._aborted.update(
            pending.request.sample_id for pending in self._running if matches(pending)
        )
        for pending in [pending for pending in self._waiting if matches(pending)]:
            self._waiting.remove(pending)
            _set_output(pending, GenerateOutput(pending.request.sample_id, (), (), "abort", ()))

    async def _serve(self) -> None:
        await asyncio.sleep(0)  # batch all requests of this event-loop iteration
        while self._waiting:
            self._running = self._next_batch()
            try:
                await self._serve_batch(self._running)
            except Exception as error:
                for pending in self._running:
                    if not pending.output.done():
                        pending.output.set_exception(error)
            finally:
                self._running = []
                self._aborted.clear()

    async def _serve_batch(self, batch: Sequence[_PendingRequest]) -> None:
        tokens = self._decode(
            [pending.request for pending in batch], batch[0].sampling, self._aborted
        )
        while True:
            while self.paused:
                await asyncio.sleep(PAUSED_POLL_S)
            with self._token_lock:
                ended = next(tokens, None)
            if ended is None:
                return
            for index, output in ended.items():
                _set_output(batch[index], output)
            await asyncio.sleep(0)

    def _next_batch(self) -> list[_PendingRequest]:
        """The oldest request and others with equal sampling parameters. Equal prompts are adjacent,
        so that each is prefilled once."""
        first = self._waiting[0]
        sampling = first.sampling
        compatible = [
            pending
            for pending in self._waiting
            if pending.sampling == sampling and self._together(first.request, pending.request)
        ]
        batch = compatible[
            : self._batch_size([pending.request for pending in compatible], sampling)
        ]
        for pending in batch:
            self._waiting.remove(pending)
        return sorted(
            batch,
            key=lambda pending: (len(pending.request.prompt_tokens), pending.request.prompt),
        )


def _set_output(pending: _PendingRequest, output: GenerateOutput) -> None:
    if not pending.output.done():
        pending.output.set_result(output)
