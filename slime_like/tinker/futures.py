"""Accepted requests (futures), and the queues that they wait in."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slime_like.tinker import codec

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_JOURNALED = "id op queue seq owner digest created state content_type category finished extra size"


@dataclass(slots=True, eq=False)
class Request:
    """A request and its result."""

    id: str
    op: str
    queue: str  # of the model or sampler
    seq: int  # number within the queue
    owner: str
    digest: str  # of the original body, to distinguish a retry from a different request
    created: float
    # plain values for the operation, dropped when done
    body: codec.Message = field(default_factory=dict)
    state: str = "waiting"  # running, done
    result: bytes = b""
    content_type: str = ""  # of the result; "" for an error
    category: str = ""  # of an error, user or server
    started: float = 0.0
    finished: float = 0.0
    fetched: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict)  # sent together with the request's id
    size: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __lt__(self, other: Request) -> bool:
        return self.seq < other.seq

    @property
    def failed(self) -> bool:
        return self.state == "done" and not self.content_type

    def finish(self, result: bytes, content_type: str, category: str = "") -> None:
        self.result = result
        self.content_type = content_type
        self.category = category
        self.state = "done"
        self.finished = time.time()
        self.body = {}
        self.done.set()

    def record(self) -> dict[str, object]:
        """The request's journal entry."""
        return {name: getattr(self, name) for name in _JOURNALED.split()}

    @staticmethod
    def from_journal(record: codec.Message, body: bytes | None, result: bytes | None) -> Request:
        request = Request(**{**record, "state": "waiting"})
        if record["state"] == "done":
            request.state = "done"
            request.result = result or b""
            request.done.set()
        elif body is not None:
            try:
                request.body = codec.decode(body)
            except ValueError:
                request.body = {"refusal": "another version of the server wrote it; send it again"}
        return request


def json_result(value: dict[str, object]) -> tuple[bytes, str]:
    """Serialise a result. Successful responses have no field `error`, because clients would treat
    them as failures."""
    assert "error" not in value
    return json.dumps(value, allow_nan=False).encode(), JSON


class Queue:
    """Requests of a model, executed by sequence number regardless of arrival order; or requests of
    a sampler, executed in order of arrival."""

    def __init__(self, key: str, *, next_seq: int | None, in_order: bool = False) -> None:
        """
        Args:
            next_seq: First sequence number; None for order of arrival.
            in_order: The client sends a request only once the one before it was answered or given
                up, as Tinker's SDK does: a number that is missing then never comes.
        """
        self.key = key
        self.next_seq = next_seq
        self.in_order = in_order
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        if self.next_seq is None:
            self._waiting.append(request)
        else:
            heapq.heappush(self._waiting, request)

    @property
    def ready(self) -> bool:
        if not self._waiting:
            return False
        return self.next_seq is None or self._waiting[0].seq == self.next_seq

    def has_taken(self, seq: int) -> bool:
        """Whether this sequence number is consumed; any may be in order of arrival."""
        return self.next_seq is None or seq < self.next_seq

    def first(self) -> Request:
        return self._waiting[0]

    def take(self) -> Request:
        """Remove and return the next request of a model; its sequence number is consumed."""
        assert self.ready and self.next_seq is not None
        self.next_seq += 1
        return heapq.heappop(self._waiting)

    def in_arrival_order(self) -> Iterator[Request]:
        """The waiting requests; only for order of arrival."""
        assert self.next_seq is None
        return iter(self._waiting)

    def remove(self, request: Request) -> None:
        """Remove a waiting request; only for order of arrival."""
        assert self.next_seq is None
        self._waiting.remove(request)

    def take_all(self) -> list[Request]:
        """Remove all waiting requests, and consume all sequence numbers up to the last of them."""
        taken = sorted(self._waiting)
        self._waiting = []
        if taken and self.next_seq is not None:
            self.next_seq = taken[-1].seq + 1
        return taken

    def skip_missing(self) -> range:
        """Give up the missing numbers before the first waiting request; returns them."""
        assert self.next_seq is not None and self._waiting
        missing = range(self.next_seq, self._waiting[0].seq)
        self.next_seq = missing.stop
        return missing

    def missing_since(self) -> float | None:
        """Arrival time of the oldest request that waits for a missing sequence number; None if
        there is no gap."""
        if self.next_seq is None or not self._waiting or self.ready:
            return None
        return min(request.created for request in self._waiting)
