"""A rank that cannot make its next bucket, while its sending thread waits for a turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.weight_sync.transports import broadcast_ranks
from slime_like.weight_sync.transports.broadcast_ranks import BroadcastOrder, Membership, Turns
from slime_like.weight_sync.transports.process_group import BroadcastFailed, GroupRendezvous
from slime_like.weights.buckets import Bucket, WeightBuckets, in_buckets


def ask_until(deadline: float, turns: Turns) -> None:
    while time.monotonic() < deadline:
        turns.raise_if_failed()
        time.sleep(0.01)


def test_rank_zero_learns_of_a_bucket_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits in the group's own connection, so the error goes through another one; rank 0
    then releases the thread, and the rank leaves the group."""
    rendezvous = GroupRendezvous(["http://127.0.0.1:1"], 60.0)
    sent: list[int] = []
    left: list[str] = []
    making_fails = threading.Event()

    def buckets() -> Iterator[Bucket]:
        for number in range(3):
            if number == 2:
                assert making_fails.wait(30)
                raise RuntimeError("out of memory\nand more")
            weight = torch.full((4,), float(number))
            yield from in_buckets(iter([(f"w{number}", weight)]), 16)

    member = SimpleNamespace(
        broadcast=lambda flat, wait: sent.append(int(flat.view(torch.float32)[0])),
        abandon=lambda: left.append("the group"),
    )
    order = BroadcastOrder("groups", rendezvous.address, rendezvous.port, 2, "gloo", 60.0, "update")
    membership: Any = Membership("groups", rendezvous.connect(), member)  # type: ignore[arg-type]
    monkeypatch.setattr(broadcast_ranks, "_membership", [membership])
    monkeypatch.setattr(broadcast_ranks.dist, "get_rank", lambda: 3)
    plan = [SimpleNamespace(sender=sender) for sender in (3, 0, 3, 3)]
    weights: Any = SimpleNamespace(plan=plan, own=lambda: WeightBuckets(buckets()))
    assisting = threading.Thread(target=order.assist, args=(weights,))
    assisting.start()
    turns = Turns(rendezvous.store, "update")
    turns.grant(0)
    deadline = time.monotonic() + 30
    while sent != [0]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    making_fails.set()  # its thread now waits for the turn of the next bucket
    with pytest.raises(BroadcastFailed, match=r"^rank 3: out of memory$"):
        ask_until(deadline, turns)
    assert assisting.is_alive()
    turns.end(range(len(plan)))
    assisting.join(30)
    assert not assisting.is_alive()
    assert sent == [0] and left == ["the group"]
    assert not any(thread.name == "weight-sending" for thread in threading.enumerate())
