"""The next bucket is made while one is sent: in order, two at most, and an error of either side ends
both."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.servers.http import RequestFailed
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.transports import overlap, tensor
from slime_like.weight_sync.transports.overlap import Handover, NotMade, send_while_made
from slime_like.weight_sync.transports.tensor import NodeOrder
from slime_like.weights.buckets import Bucket, WeightBuckets, in_buckets

BUCKETS = 6


class Making:
    """Buckets, how many were alive at most, and which are being made."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        self.fails_at = fails_at
        self.begun = [threading.Event() for _ in range(BUCKETS + 1)]

    def __iter__(self) -> Iterator[Bucket]:
        for number in range(BUCKETS):
            self.begun[number].set()
            if number == self.fails_at:
                raise MemoryError("no memory for a bucket")
            weight = torch.full((1024,), float(number))
            (bucket,) = in_buckets(iter([(f"w{number}", weight)]), 4096)
            del weight
            self.alive.append(weakref.ref(bucket.flat))
            self.most = max(self.most, self.now())
            yield bucket
            del bucket
        self.begun[BUCKETS].set()

    def now(self) -> int:
        return sum(each() is not None for each in self.alive)


def number_of(bucket: Bucket) -> int:
    return int(bucket.weights[0][1][0])


def threads_now() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weight-sending"]


def test_the_next_bucket_is_made_while_one_is_sent() -> None:
    making = Making()
    sent: list[int] = []

    def send(buckets: Handover) -> None:
        for bucket in buckets:
            sent.append(number_of(bucket))
            # without overlap it would be made only after this returns
            assert making.begun[sent[-1] + 1].wait(20)
            if sent[-1] + 2 < BUCKETS:  # the one after waits for the end of this one
                assert not making.begun[sent[-1] + 2].wait(0.02)
            del bucket

    send_while_made(iter(making), send)
    assert sent == list(range(BUCKETS))
    assert making.most == 2 and making.now() == 0
    assert threads_now() == []


def test_an_error_of_the_sender_ends_the_making() -> None:
    making = Making()

    def send(buckets: Handover) -> None:
        next(buckets)
        next(buckets)
        raise ConnectionError("server 1 is gone")

    stream = iter(making)
    with pytest.raises(ConnectionError, match="server 1 is gone") as caught:
        send_while_made(stream, send)
    assert threads_now() == []
    # its error, which is handled now, keeps none of those that were sent or made
    assert caught.value is not None and making.now() == 1, "that which the generator holds"
    # what is left stays, because the ranks' collectives go on to its end
    assert [number_of(bucket) for bucket in stream] == [3, 4, 5]


def test_an_error_of_the_making_ends_the_sender() -> None:
    sent: list[int] = []
    told: list[BaseException] = []
    ended: list[BaseException] = []

    def send(buckets: Handover) -> None:
        try:
            for bucket in buckets:
                sent.append(number_of(bucket))
        except NotMade as error:
            ended.append(error)
            raise

    with pytest.raises(MemoryError, match="no memory") as raised:
        send_while_made(iter(Making(fails_at=3)), send, told.append)
    assert sent == [0, 1, 2]
    assert len(ended) == 1 and told == [raised.value]
    assert raised.value.__notes__ == ["while a bucket of weights was made for the servers"]
    assert threads_now() == []


def test_an_interrupt_does_not_wait_for_a_server() -> None:
    release = threading.Event()

    def buckets() -> Iterator[Bucket]:
        yield from list(Making())[:1]
        raise KeyboardInterrupt

    def send(handed: Handover) -> None:
        next(handed)
        assert release.wait(60)
        with pytest.raises(NotMade):
            handed.raise_if_not_made()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        send_while_made(buckets(), send)
    assert time.monotonic() - start < 30
    release.set()


def test_bytes_in_requests_go_while_the_next_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses gets no more; the others all, in order."""
    making = Making()
    got: dict[str, list[int]] = {"http://a": [], "http://b": []}

    class Control:
        def __init__(self, connect_s: float) -> None: ...

        def call(self, url: str, body: Any, *, timeout_s: float) -> dict[str, object]:
            server = url.removesuffix("/update_weights_from_tensor")
            number = len(got["http://a"])
            if server == "http://b":
                if len(got[server]) == 2:
                    raise RequestFailed("no", "b refuses", retryable=False)
                got[server].append(1)
                return {}
            assert making.begun[number + 1].wait(20), "made meanwhile"
            got[server].append(number)
            return {}

        def close(self) -> None: ...

    monkeypatch.setattr(tensor, "ControlClient", Control)
    order = NodeOrder({}, 1, as_handles=False, connect_s=1.0, timeout_s=20.0, api=SglangApi())
    failed = order.send(WeightBuckets(iter(making)), {"http://a": 1, "http://b": 1})
    assert failed == {"http://b": "b refuses"}
    assert got["http://a"] == list(range(BUCKETS))
    assert making.most == 2 and making.now() == 0


def test_on_a_gpu_the_sender_waits_for_its_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels that the making thread has queued, it waits for those before the handover; and
    its own kernels are in a stream of its own."""
    log: list[Any] = []
    current = threading.local()

    class Event:
        def record(self, stream: Any) -> None:
            log.append(("recorded in", stream))

    class Stream:
        def __init__(self, device: Any) -> None: ...

        def wait_event(self, event: Event) -> None:
            log.append(("waits", threading.current_thread().name))

    cuda = SimpleNamespace(
        Event=Event,
        Stream=Stream,
        current_stream=lambda device: getattr(current, "stream", "default"),
        set_device=lambda device: log.append(("device", str(device))),
        set_stream=lambda stream: setattr(current, "stream", stream),
    )
    monkeypatch.setattr(overlap.torch, "cuda", cuda)
    streams: list[Any] = []

    def buckets() -> Iterator[Any]:
        for _ in range(2):
            yield SimpleNamespace(flat=SimpleNamespace(device=torch.device("cuda:3")))

    def send(handed: Handover) -> None:
        for _ in handed:
            streams.append(current.stream)

    send_while_made(buckets(), send)
    of_each = [("recorded in", "default"), ("device", "cuda:3"), ("waits", "weight-sending")]
    assert sorted(log, key=str) == sorted(2 * of_each, key=str)
    assert all(isinstance(stream, Stream) for stream in streams)
    assert not hasattr(current, "stream"), "the making thread's stays"
