"""The engine of one episode with --partial-rollout: it generates up to a token budget or until it
is stopped; the agent's requests then wait until it is resumed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.unfinished import Unfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PausableEngine:
    """A `GenerationClient` that can be paused."""

    def __init__(
        self,
        engine: GenerationClient,
        tokenizer: PreTrainedTokenizerBase,
        slots: asyncio.Semaphore,
        changed: asyncio.Event,
    ) -> None:
        """
        Args:
            engine: Generates the tokens.
            tokenizer: The engine's.
            slots: Slots for concurrently running episodes.
            changed: Set whenever no more tokens are generated until `resume_generation`; may be
                shared between episodes.
        """
        # nothing is being generated and requests of the agent wait; the episode occupies no slot
        self.paused = False
        self.changed = changed
        self.unfinished: list[Unfinished] = []  # completions in progress
        self._engine = engine
        self._tokenizer = tokenizer
        self._slots = slots
        self._left: float = math.inf  # tokens until it is paused
        self._waiting = self._running = self._stops = 0
        self._resumed = asyncio.Event()
        self._started = self._holds_slot = self._over = False
        self._paused_since = self._paused_s = 0.0

    @property
    def paused_s(self) -> float:
        """Total time in seconds for which the episode was paused."""
        now = asyncio.get_running_loop().time()
        return self._paused_s + (now - self._paused_since if self.paused else 0.0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being generated, nor will be before `resume_generation`; the agent may
        still run."""
        return self._left <= 0 and not self._running

    def allow(self, tokens: float) -> None:
        """Set the number of tokens until the first pause, before the episode begins."""
        self._left = tokens

    async def begin(self) -> None:
        """Wait for a slot."""
        await self._slots.acquire()
        self._started = self._holds_slot = True

    def stop(self) -> None:
        """Let new requests wait, as well as requests that the engine aborts."""
        self._left = 0
        self._stops += 1
        self._pause_if_idle()

    async def resume_generation(self, tokens: float, engine: GenerationClient) -> None:
        """Continue after a pause: wait for a slot, and generate up to `tokens` more with `engine`,
        unless stopped in the meantime."""
        stops = self._stops
        if self._started and not self._holds_slot:
            await self.begin()
        if self._over:
            self.end()
        elif stops != self._stops:
            self._release_slot()
        else:
            self._paused_s = self.paused_s
            self.paused = False
            self._left = tokens
            self._engine = engine
            self._resumed.set()

    def end(self) -> None:
        """Mark the episode as finished, and free its slot."""
        self._over = True
        self._release_slot()

    def _release_slot(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self._slots.release()

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Like the engine's. A completion that is paused midway continues with the current weights,
        and records a weight version per token."""
        answer = Unfinished.of(request)
        self.unfinished.append(answer)
        try:
            while True:
                await self._wait_until_resumed()
                output = await self._generate_part(answer, sampling)
                aborted = output.finish_reason == "abort" and output.failure is None
                paused = aborted and self._left <= 0
                if not paused and output.finish_reason != "length":
                    return output
                if len(output.tokens) >= sampling.max_new_tokens:
                    return replace(output, finish_reason="length")
        finally:
            self.unfinished.remove(answer)

    async def _wait_until_resumed(self) -> None:
        while self._left <= 0:
            self._resumed.clear()
            self._waiting += 1
            self._pause_if_idle()
            try:
                await self._resumed.wait()
            finally:
                self._waiting -= 1

    async def _generate_part(self, answer: Unfinished, sampling: SamplingParams) -> GenerateOutput:
        room = min(sampling.max_new_tokens - len(answer.output.tokens), self._left)
        self._running += 1
        try:
            part = await self._engine.generate_one(
                answer.remaining_request, replace(sampling, max_new_tokens=int(room))
            )
        finally:
            self._running -= 1
            self._pause_if_idle()
        self._left -= max(len(part.tokens), 1)
        answer.append(part, sampling, self._tokenizer)
        return answer.output

    def _pause_if_idle(self) -> None:
        if not self.is_idle:
            return
        if self._waiting and not self.paused:
            self.paused = True
            self._paused_since = asyncio.get_running_loop().time()
            self._release_slot()  # frees the slot for other episodes
        self.changed.set()

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        await self._engine.abort(sample_ids)

    async def leave_loop(self) -> None:
        await self._engine.leave_loop()
