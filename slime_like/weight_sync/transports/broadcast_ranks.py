"""Broadcast from every rank that has weights, each over its own process group with all servers.

A server takes one bucket at a time; two servers that took buckets of two senders in different
orders would deadlock. So rank 0 calls the servers bucket by bucket, in the order of a plan known to
all ranks, and signals the sender through the rendezvous store. A sender gathers its next bucket
while it or others send. Failures are signalled through the same store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from slime_like.weight_sync.transports.overlap import Handover, send_while_made
from slime_like.weight_sync.transports.process_group import POLL_S, BroadcastFailed, Member, connect
from slime_like.weights.gather import WeightStream

FAILURE_POLL_S = 0.05  # polling interval of the failure signal
GO = "go"
STOP = "stop"
LONGEST = timedelta(days=1)  # rank 0 enforces the time limit; if rank 0 dies, its store dies too


class Turns:
    """Turn-taking in an update: which bucket of the plan is next, and whether the update failed."""

    def __init__(self, store: dist.Store, update: str) -> None:
        self._store = store
        self._update = update
        self._last_check = 0.0

    def grant(self, number: int) -> None:
        self._store.set(f"{self._update}/{number}", GO)

    def wait_for_turn(self, number: int) -> None:
        """Wait for the turn of bucket `number`. Raises BroadcastFailed if the update ends
        before."""
        key = f"{self._update}/{number}"
        self._store.wait([key], LONGEST)
        if self._store.get(key).decode() == STOP:
            raise BroadcastFailed("the update was given up")

    def fail(self, message: str) -> None:
        self._store.set(f"{self._update}/failed", message)

    def end(self, numbers: range) -> None:
        """Release the waiters of these buckets."""
        for number in numbers:
            self._store.set(f"{self._update}/{number}", STOP)

    def raise_if_failed(self) -> None:
        """Raise BroadcastFailed if a rank has failed; polls the store at intervals."""
        if time.monotonic() - self._last_check >= FAILURE_POLL_S:
            self._last_check = time.monotonic()
            key = f"{self._update}/failed"
            if self._store.check([key]):
                raise BroadcastFailed(self._store.get(key).decode())


@dataclass(frozen=True, slots=True)
class BroadcastOrder:
    """Order to join this rank's group (if not joined yet) and broadcast its weights."""

    groups: str  # common name of the update's groups
    address: str  # rendezvous
    port: int  # rendezvous
    world: int  # members per group
    backend: str
    timeout_s: float
    update: str  # id of this attempt

    def name_of(self, sender: int) -> str:
        return f"{self.groups}_{sender}"

    def assist(self, weights: WeightStream) -> None:
        stream = weights.own().buckets()
        rank = dist.get_rank()
        numbers = [n for n, planned in enumerate(weights.plan) if planned.sender == rank]
        turns: Turns | None = None
        try:
            if numbers:
                membership = self._join()
                turns = Turns(membership.store, self.update)
                send = partial(
                    _send_in_turn, numbers=numbers, member=membership.member, turns=turns
                )
                send_while_made(stream, send, self._fail)
        except (RuntimeError, OSError) as failure:
            leave_group()
            if turns is not None:
                with contextlib.suppress(RuntimeError):
                    turns.fail(_of_this_rank(failure))
        for _ in stream:  # consume: it contains collectives
            pass

    def _fail(self, error: BaseException) -> None:
        """Tell rank 0, which lets the sending thread go. That thread may wait for its turn in the
        group's own connection."""
        with contextlib.suppress(RuntimeError):
            store = connect(self.address, self.port, self.timeout_s)
            Turns(store, self.update).fail(_of_this_rank(error))

    def _join(self) -> Membership:
        if not _membership or _membership[0].groups != self.groups:
            leave_group()
            store = connect(self.address, self.port, self.timeout_s)
            name = self.name_of(dist.get_rank())
            member = Member(name, store, self.world, self.backend, self.timeout_s)
            _membership.append(Membership(self.groups, store, member))
        return _membership[0]


@dataclass(frozen=True, slots=True)
class Membership:
    groups: str
    store: dist.Store
    member: Member


_membership: list[Membership] = []  # this rank's group, reused by the next update


def leave_group() -> None:
    """Leave the group without waiting for the other members."""
    while _membership:
        _membership.pop().member.abandon()


def _of_this_rank(error: BaseException) -> str:
    return f"rank {dist.get_rank()}: {(str(error) or type(error).__name__).splitlines()[0]}"


def _send_in_turn(own: Handover, numbers: Sequence[int], member: Member, turns: Turns) -> None:
    """numbers: of this rank's buckets in the plan."""
    wait = _wait_unless_failed(turns)
    for number in numbers:
        bucket = next(own)
        turns.wait_for_turn(number)
        member.broadcast(bucket.flat, wait)
        del bucket  # free it before the next one is taken


def _wait_unless_failed(turns: Turns) -> Callable[[Callable[[], bool]], None]:
    def wait(done: Callable[[], bool]) -> None:
        while not done():
            turns.raise_if_failed()
            time.sleep(POLL_S)

    return wait
