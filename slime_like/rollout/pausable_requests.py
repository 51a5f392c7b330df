"""Requests that outlive an evaluation or a checkpoint: while they are paused nothing is generated,
and afterwards they continue with the tokens that they have."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_like.engines.base import (
    ABORT_AGAIN_S,
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.unfinished import Unfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PausableRequests:
    """A `GenerationClient` in front of an engine. All methods belong to one event loop."""

    def __init__(self, engine: GenerationClient, tokenizer: PreTrainedTokenizerBase) -> None:
        self.unfinished: list[Unfinished] = []  # completions in progress
        self._engine = engine
        self._tokenizer = tokenizer
        self._running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Like the engine's. A completion that was paused midway continues with the current
        weights; each token has the version and the log-prob that it was sampled with."""
        answer = Unfinished.of(request)
        self.unfinished.append(answer)
        try:
            while True:
                await self._open.wait()
                await self._generate_part(answer, sampling)
                output = answer.output
                if output.finish_reason != "abort" or output.failure is not None:
                    return output
                if len(output.tokens) >= sampling.max_new_tokens:
                    return replace(output, finish_reason="length")
                if self._open.is_set():  # not paused: the caller has aborted it
                    return output
        finally:
            self.unfinished.remove(answer)

    async def _generate_part(self, answer: Unfinished, sampling: SamplingParams) -> None:
        room = sampling.max_new_tokens - len(answer.output.tokens)
        self._running += 1
        try:
            part = await self._engine.generate_one(
                answer.remaining_request, replace(sampling, max_new_tokens=room)
            )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        answer.append(part, sampling, self._tokenizer)

    async def pause(self) -> None:
        """Stop generating: requests keep their tokens, new ones wait. Returns when the engine is
        idle and has left the loop."""
        self._open.clear()
        while self._running:
            self._idle.clear()
            await self._engine.abort()
            if self._running:
                await _wait(self._idle, ABORT_AGAIN_S)
        await self._engine.leave_loop()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._open.set()

    async def until_open(self) -> None:
        """Wait while paused."""
        await self._open.wait()

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        await self._engine.abort(sample_ids)

    async def leave_loop(self) -> None:
        await self._engine.leave_loop()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
