"""Episodes that span several rollouts (--partial-rollout): agents keep running, but wait for the
engine while the run trains.

They share one event loop, which only runs while the run samples or evaluates; its clock stops in
between, so that agents' time limits do not include training. A checkpoint stores the tokens of an
unfinished episode, but not its agent: a resumed run restarts the episode and discards those tokens.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from slime_like.agents.episode_samples import sequence
from slime_like.agents.pausable_engine import PausableEngine
from slime_like.agents.sessions import Session
from slime_like.engines.base import GenerationClient
from slime_like.types import Sample, SampleStatus

T = TypeVar("T")

STARTED = "start_rollout_id"  # key in a sample's metadata
END_S = 10.0  # seconds for agents to end with the run


class StoppableLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while the loop is not running. Also a `LoopRunner`."""

    def __init__(self) -> None:
        self._suspended_s = 0.0
        self._stopped_at: float | None = time.monotonic()
        super().__init__()

    def time(self) -> float:
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._suspended_s

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run the work; returns its result."""
        if self._stopped_at is not None:
            self._suspended_s += time.monotonic() - self._stopped_at
            self._stopped_at = None
        try:
            return self.run_until_complete(work)
        finally:
            self._stopped_at = time.monotonic()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self

    def __enter__(self) -> StoppableLoop:
        return self

    def __exit__(self, *error: object) -> None:
        """Does not close the loop, which lives longer than its callers."""


@dataclass(eq=False, slots=True)
class LiveEpisode:
    """A running episode."""

    engine: PausableEngine  # used by this episode only
    task: asyncio.Task[Sample]  # returns the final sample
    partial_sample: Callable[[], Sample]  # returns the current sample while the episode is paused


# (sample, token limit until it is paused, event to set on pauses) -> a started episode
Begin = Callable[[Sample, float, asyncio.Event], LiveEpisode]


class LiveEpisodes:
    """The episodes of one rank. loop: event loop of all episodes. Not thread-safe: rounds,
    evaluations and rollouts with `respond` must not overlap."""

    def __init__(self) -> None:
        self.loop = StoppableLoop()
        self._live: dict[int, LiveEpisode] = {}
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        atexit.register(self.close)  # if the run fails, agents must end as well

    def __contains__(self, sample_id: int) -> bool:
        return sample_id in self._live

    def round(
        self, samples: Sequence[Sample], begin: Begin, engine: GenerationClient, limit: int | None
    ) -> list[Sample]:
        """Start or continue episodes until each has ended or is paused.

        Args:
            samples: Those to be continued are PARTIAL.
            begin: Starts an episode in the event loop.
            engine: For continued episodes.
            limit: Tokens that each may generate before it is paused; None: no limit.

        Returns:
            The samples in order; paused ones are PARTIAL, with their tokens so far.
        """
        work = self._round(samples, begin, engine, limit or math.inf)
        done: list[Sample] = self.loop.run(work)
        return done

    async def respond(self, sample: Sample, begin: Begin, engine: GenerationClient) -> Sample:
        """Run one episode until it ends or is stopped by `stop`, which makes it PARTIAL, with its
        tokens so far. Args as for `round`."""
        stop = self._stop
        resuming = None
        if (live := self._live.get(sample.sample_id)) is not None:
            resuming = asyncio.create_task(live.engine.resume_generation(math.inf, engine))
        else:
            live = self._start(sample, begin, math.inf, asyncio.Event())
        changed = live.engine.changed
        while not live.task.done() and not (stop.is_set() and live.engine.is_idle):
            await changed.wait()
            changed.clear()
        if resuming is not None:
            resuming.cancel()  # if it still waits for a slot
        return self._result(sample)

    def stop(self) -> None:
        """Stop generation for the episodes of `respond`. Agents that are not generating, e.g.
        waiting for a tool, keep running; the others wait for the response to their request."""
        for live in self._live.values():
            live.engine.stop()
        self._stop.set()
        self._stop = asyncio.Event()

    def run_while_paused(self, work: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        """Run `work` in the same loop, while paused episodes stay paused."""

        async def run() -> list[Sample]:
            return await work()

        done: list[Sample] = self.loop.run(run())
        return done

    def _start(
        self, sample: Sample, begin: Begin, limit: float, changed: asyncio.Event
    ) -> LiveEpisode:
        live = begin(sample, limit, changed)
        live.task.add_done_callback(lambda _: changed.set())
        self._live[sample.sample_id] = live
        return live

    async def _round(
        self, samples: Sequence[Sample], begin: Begin, engine: GenerationClient, limit: float
    ) -> list[Sample]:
        resuming = []
        for sample in samples:
            live = self._live.get(sample.sample_id)
            if live is not None:
                resuming.append(asyncio.ensure_future(live.engine.resume_generation(limit, engine)))
            else:
                self._start(sample, begin, limit, self._changed)
        await asyncio.gather(*resuming)
        episodes = [self._live[sample.sample_id] for sample in samples]
        while any(not (e.task.done() or e.engine.paused) for e in episodes):
            await self._changed.wait()
            self._changed.clear()
        return [self._result(sample) for sample in samples]

    def _result(self, sample: Sample) -> Sample:
        live = self._live[sample.sample_id]
        if live.task.done():
            del self._live[sample.sample_id]
            result = live.task.result()
        else:
            result = replace(live.partial_sample(), status=SampleStatus.PARTIAL)
        if STARTED not in sample.metadata:
            return result
        return replace(result, metadata={**result.metadata, STARTED: sample.metadata[STARTED]})

    def close(self) -> None:
        """End all agents. May be called twice."""

        async def end() -> None:
            tasks = [live.task for live in self._live.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_S)

        if self.loop.is_running():  # in a thread that the run abandoned
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self.loop).result(END_S)
        elif not self.loop.is_closed():
            self.loop.run(end())
            self._live.clear()
            self.loop.close()
        atexit.unregister(self.close)


def partial_sample(sample: Sample, session: Session | None, engine: PausableEngine) -> Sample:
    """The preliminary sample of a paused episode, with the tokens of completed and partial turns;
    used for statistics only, because the final sample is built separately. It keeps the images of
    its row, from which an episode of a resumed run starts."""
    sequences = (
        [] if session is None else [sequence(sample, b, session) for b in session.tree.branches()]
    )
    for answer in engine.unfinished:
        output = answer.output
        tokens = torch.tensor((*answer.request.prompt_tokens, *output.tokens))
        sequence_sample = replace(
            sample,
            tokens=tokens,
            response_length=len(output.tokens),
            loss_mask=torch.ones(len(output.tokens), dtype=torch.bool),
            rollout_log_probs=torch.tensor(output.log_probs, dtype=torch.float32),
            weight_versions=output.weight_versions,
        )
        sequences += [sequence_sample] if output.tokens else []
    if not sequences:
        return sample
    first, *others = sequences
    return replace(first, images=sample.images, branches=tuple(others))


def reset_episode(sample: Sample) -> Sample:
    """Reset an unfinished episode to before its first token, because its agent no longer exists.
    Its prompt is the agent's first one, which may have other images than the row's, its own."""
    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response_length=0,
        loss_mask=torch.empty(0, dtype=torch.bool),
        rollout_log_probs=torch.empty(0, dtype=torch.float32),
        weight_versions=(),
        sampling_mask=None,
        routed_experts=None,
        indexer_topk=None,
        response="",
        branches=(),
        metadata={k: v for k, v in sample.metadata.items() if k != STARTED},
    )
