"""Remote agent workers: they claim tasks from the gateway, run them against it, and report rewards.

A worker owns a claimed task while it sends heartbeats. Otherwise the task is reassigned with a new
session and key; the first session is discarded and its key rejected, so that no episode counts
twice.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_like.agents.messages import BadRequest

if TYPE_CHECKING:
    from slime_like.agents.task import Task

WAIT_S = 30.0  # maximum seconds for a claim to wait for a task


class WorkerLost(Exception):
    """An episode's worker sent no heartbeat; the task can be reassigned."""


@dataclass(eq=False, slots=True)
class Offer:
    """A task for a worker. Times are the event loop's."""

    task: Task
    outcome: asyncio.Future[Any]  # resolves to the reward
    taken: asyncio.Future[object]  # done when it is claimed
    offered: float
    last_heartbeat: float = 0.0
    claimed: float | None = None  # None: it is waiting


@dataclass(slots=True)
class TaskQueue:
    """The task queue of a rank."""

    keys: Collection[str]  # the workers' keys
    timeout_s: float  # of an episode after its claim, and of the wait for any worker
    heartbeat_s: float  # silence after which a worker is considered lost
    _waiting: deque[Offer] = field(default_factory=deque)
    _claimed: dict[str, Offer] = field(default_factory=dict)
    _claims: deque[asyncio.Future[Offer | None]] = field(default_factory=deque)
    _closing: bool = False  # no more tasks: the gateway is closing
    _last_claim: float = 0.0  # the last claim of any worker
    _loop: asyncio.AbstractEventLoop | None = None

    def is_worker_key(self, key: str) -> bool:
        """Whether it is a worker's key."""
        return any([hmac.compare_digest(key.encode(), own.encode()) for own in self.keys])

    async def play(self, task: Task) -> float | None:
        """Let a worker run the task; returns the reward that it reports.

        Raises:
            WorkerLost: See there.
            RuntimeError: No worker claims tasks, or the worker took too long or reported an error.
        """
        loop = self._current_loop()
        self._closing = False
        offer = Offer(task, loop.create_future(), loop.create_future(), loop.time())
        self._offer(offer)
        try:
            while True:
                end = self._deadline(offer)
                awaited = {offer.outcome} if offer.taken.done() else {offer.outcome, offer.taken}
                remaining = max(end - loop.time(), 0.001)
                await asyncio.wait(awaited, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if offer.outcome.done():
                    return offer.outcome.result()
                if loop.time() >= self._deadline(offer):  # heartbeats and claims extend it
                    raise self._timeout_error(offer, loop.time())
        finally:
            self._claimed.pop(task.api_key, None)
            if offer in self._waiting:
                self._waiting.remove(offer)

    async def claim(self, wait_s: float) -> Task | None:
        """The oldest task, for a worker; None if there is none within `wait_s` seconds."""
        loop = self._current_loop()
        self._last_claim = loop.time()
        if self._closing:
            return None
        offer: Offer | None
        if self._waiting:
            offer = self._waiting.popleft()
        else:
            claim_future: asyncio.Future[Offer | None] = loop.create_future()
            self._claims.append(claim_future)
            try:
                await asyncio.wait({claim_future}, timeout=wait_s)
            except asyncio.CancelledError:  # the worker disconnected, perhaps holding a task
                if claim_future.done() and (offer := claim_future.result()) is not None:
                    self._offer(offer)
                raise
            finally:
                if claim_future in self._claims:
                    self._claims.remove(claim_future)
            offer = claim_future.result() if claim_future.done() else None
        if offer is None:
            return None
        offer.claimed = offer.last_heartbeat = self._last_claim = loop.time()
        self._claimed[offer.task.api_key] = offer
        offer.taken.set_result(None)
        return offer.task

    def release(self) -> None:
        """Respond to waiting workers that there is no task, and to later ones until there is
        one."""
        self._closing = True
        for claim_future in self._claims:
            if not claim_future.done():
                claim_future.set_result(None)

    def heartbeat(self, key: str) -> None:
        """Record a heartbeat. key: of the episode. Raises BadRequest if it does not belong to a
        claimed task."""
        self._claimed_offer(key).last_heartbeat = self._current_loop().time()

    def finish(self, key: str, reward: object, error: object) -> None:
        """Finish an episode. Raises BadRequest like `heartbeat`.

        Args:
            reward: See `episode_samples.bad_reward`.
            error: Why there is no reward, or None.
        """
        outcome = self._claimed_offer(key).outcome
        if outcome.done():
            return  # a repeated report
        if error is None:
            outcome.set_result(reward)
        else:
            outcome.set_exception(RuntimeError(f"the worker reported: {error!s:.400}"))

    def _current_loop(self) -> asyncio.AbstractEventLoop:
        """The current event loop, which differs between rollouts."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._last_claim = loop.time()
            self._waiting.clear()
            self._claimed.clear()
            self._claims.clear()
        return loop

    def _offer(self, offer: Offer) -> None:
        while self._claims:
            claim_future = self._claims.popleft()
            if not claim_future.done():
                claim_future.set_result(offer)
                return
        self._waiting.append(offer)

    def _claimed_offer(self, key: str) -> Offer:
        offer = self._claimed.get(key)
        if offer is None:
            raise BadRequest("the key is of no task that a worker has claimed")
        return offer

    def _deadline(self, offer: Offer) -> float:
        if offer.claimed is None:
            return max(offer.offered, self._last_claim) + self.timeout_s
        return min(offer.claimed + self.timeout_s, offer.last_heartbeat + self.heartbeat_s)

    def _timeout_error(self, offer: Offer, now: float) -> Exception:
        if offer.claimed is None:
            return RuntimeError(f"no worker has asked for a task for {self.timeout_s:g} s")
        if now >= offer.claimed + self.timeout_s:
            return RuntimeError(f"it took longer than --agent-timeout-s {self.timeout_s:g}")
        return WorkerLost(f"no heartbeat for {self.heartbeat_s:g} s")
