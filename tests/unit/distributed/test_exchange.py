"""Items from the ranks that have them to those that want them: the real code of every rank, in
threads of one process, and its arithmetic for many ranks."""

from __future__ import annotations

import random
import threading
from collections import Counter
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime_like.distributed.exchange import Delivery, Message, Sharing, Traffic, deliver


class Mail:
    """Messages of all ranks, in memory."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def box(self, source: int, destination: int) -> Queue[Tensor]:
        with self._lock:
            return self._boxes.setdefault((source, destination), Queue())


class Got:
    """A receive that ends when a message of its size has come."""

    def __init__(self, box: Queue[Tensor], buffer: Tensor) -> None:
        self._box, self._buffer = box, buffer

    def wait(self) -> None:
        sent = self._box.get(timeout=60)
        assert sent.shape == self._buffer.shape
        self._buffer.copy_(sent)


class Sent:
    def wait(self) -> None:
        return None


class Rank:
    """A transport."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank

    def send(self, buffer: Tensor, destination: int) -> Sent:
        self._mail.box(self._rank, destination).put(buffer.clone())
        return Sent()

    def receive(self, buffer: Tensor, source: int) -> Got:
        return Got(self._mail.box(source, self._rank), buffer)


def content(item: int, size: int) -> Tensor:
    return (torch.arange(size) * 31 + item * 7).to(torch.uint8)


def run_all(delivery: Delivery) -> tuple[list[dict[int, Tensor]], list[Traffic]]:
    """What every rank gets, and what it has sent."""
    mail = Mail()
    got: list[dict[int, Tensor]] = [{} for _ in range(delivery.num_ranks)]
    traffic: list[Any] = [None] * delivery.num_ranks

    def work(rank: int) -> None:
        def pack(item: int) -> Tensor:
            if delivery.holders[item] == rank:
                return content(item, int(delivery.nbytes[item]))
            return got[rank][item]

        traffic[rank] = deliver(delivery, rank, pack, got[rank].__setitem__, Rank(mail, rank))

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True)
        for rank in range(delivery.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(t is not None for t in traffic), "a rank waits for another"
    return got, traffic


def made(rng: random.Random, *, ranks: int, one_holder: bool, buffer_size: int) -> Delivery:
    """Random sizes, some 0, and two layouts, of which one may leave ranks without an item."""
    items = rng.choice([0, 1, 5, 30])
    holders = np.array([0 if one_holder else rng.randrange(ranks) for _ in range(items)], dtype=int)
    nbytes = np.array([rng.choice([0, 1, 3, 40, 1000]) for _ in range(items)], dtype=int)

    def sharing() -> Sharing:
        parts = rng.choice([p for p in range(1, ranks + 1) if ranks % p == 0])
        of_item = np.array([rng.randrange(parts) for _ in range(items)], dtype=int)
        return Sharing(np.arange(ranks) % parts, of_item)

    return Delivery(holders, nbytes, [sharing(), sharing()], buffer_size=buffer_size)


@pytest.mark.parametrize("buffer_size", [1, 7, 100, 10**6])
@pytest.mark.parametrize("one_holder", [True, False])
def test_everyone_gets_what_it_wants_and_nothing_else(one_holder: bool, buffer_size: int) -> None:
    rng = random.Random(f"{one_holder} {buffer_size}")
    for ranks in (1, 2, 6, 8):
        delivery = made(rng, ranks=ranks, one_holder=one_holder, buffer_size=buffer_size)
        got, traffic = run_all(delivery)
        for rank in range(ranks):
            wanted = delivery.wanted_by(rank) & (delivery.holders != rank) & (delivery.nbytes > 0)
            assert sorted(got[rank]) == np.flatnonzero(wanted).tolist()
            for item, data in got[rank].items():
                assert torch.equal(data, content(item, int(delivery.nbytes[item])))
            assert traffic[rank].received == int(delivery.nbytes[wanted].sum())
            assert traffic[rank].largest_buffer <= max(1, buffer_size)
        assert sum(t.sent for t in traffic) == sum(t.received for t in traffic)
        assert sum(t.messages_sent for t in traffic) == sum(t.messages_received for t in traffic)


def test_who_has_all_items_sends_each_once() -> None:
    """The others of a part get them from the first that did, in turn."""
    items, ranks = 64, 16
    sharing = Sharing(np.arange(ranks) // 4, np.arange(items) % 4)
    delivery = Delivery(np.zeros(items, dtype=int), np.full(items, 10), [sharing], buffer_size=1000)
    _, traffic = run_all(delivery)
    assert traffic[0].sent == 10 * (48 + 16 * 3)  # other parts' items once, its own to three ranks
    assert {t.received for t in traffic[1:]} == {10 * 16}
    assert {t.sent for t in traffic[4:]} == {10 * 4 * 3}


@pytest.mark.parametrize("ranks", [8, 1024])
def test_many_ranks_agree_on_every_message(ranks: int) -> None:
    """What one sends is what the other waits for, in one order of all; and no rank's part grows
    with the number of ranks."""
    items = 2 * ranks
    of_item = np.arange(items) % (ranks // 8)
    delivery = Delivery(
        np.zeros(items, dtype=int),
        np.full(items, 1000),
        [Sharing(np.arange(ranks) // 8, of_item)],
        buffer_size=6000,
    )
    sent, awaited = Counter[tuple[int, Message]](), Counter[tuple[int, Message]]()
    for rank in range(ranks):
        for hop, messages in enumerate(delivery.hops(rank)):
            for message in messages:
                assert message.nbytes <= delivery.message_size
                (sent if message.source == rank else awaited)[hop, message] += 1
        places = [((m.destination - m.source) % ranks, m.source) for m in delivery.hops(rank)[1]]
        assert places == sorted(places)
        if rank:
            assert sum(m.nbytes for hop in delivery.hops(rank) for m in hop) <= 2 * 8 * 16_000
    assert sent == awaited and set(sent.values()) == {1}
