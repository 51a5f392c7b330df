"""NCCL makes its communicator in a group's first broadcast, inside the call. A refusal of a server
must be seen meanwhile. Only the first bucket of an update waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.servers.server_api import ServerCall
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.transports import process_group
from slime_like.weight_sync.transports.process_group import BroadcastFailed, BroadcastGroup, Member


def test_a_refusal_ends_a_first_broadcast_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    all_joined = threading.Event()
    monkeypatch.setattr(process_group.dist, "broadcast", lambda *a, **k: all_joined.wait(60))
    member = Member.__new__(Member)
    monkeypatch.setattr(member, "_group", None, raising=False)
    asked = 0

    def wait(done: Callable[[], bool]) -> None:
        nonlocal asked
        while not done():
            asked += 1
            if asked > 5:
                raise BroadcastFailed("server 1 refuses", [1])
            time.sleep(0.01)

    start = time.monotonic()
    with pytest.raises(BroadcastFailed, match="refuses"):
        member.broadcast(torch.zeros(4), wait)
    assert time.monotonic() - start < 30
    all_joined.set()


def test_what_the_broadcast_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: object, **named: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nand more")

    monkeypatch.setattr(process_group.dist, "broadcast", fails)
    member = Member.__new__(Member)
    monkeypatch.setattr(member, "_group", None, raising=False)

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(0.001)

    with pytest.raises(BroadcastFailed, match=r"^the broadcast failed: NCCL error: unhandled"):
        member.broadcast(torch.zeros(4), wait)


def test_only_the_first_bucket_of_an_update_waits_for_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = threading.Semaphore(0)

    class Sender:
        def broadcast(self, flat: torch.Tensor, wait: object) -> None:
            received.release()

        def abandon(self) -> None:
            pass

    def server(call: ServerCall) -> object:
        if call.path == "/update_weights_from_distributed":
            received.acquire()  # answers when it has the bucket
        return {"success": True}

    monkeypatch.setattr(process_group, "Member", lambda *words: Sender())
    monkeypatch.setattr(process_group, "REFUSAL_S", 1.0)
    rendezvous: Any = SimpleNamespace(address="", port=0, timeout_s=60, connect=lambda: None)
    group = BroadcastGroup("group", rendezvous, SglangApi(), [server], [1], torch.device("cpu"))
    start = time.monotonic()
    for update in range(2):
        for bucket in range(4):
            group.send([], torch.zeros(4), update, is_last=bucket == 3)
    assert 2 <= time.monotonic() - start < 6
    group.abandon()
