"""Sparse exchange: send the bytes of many items from the ranks that hold them to the ranks that
need them, once, in messages of bounded size.

`Delivery` computes the plan from what all ranks know: holder, receivers and size of each item. Each
rank derives its own part. An item is sent to one of its receivers (hop 1), which forwards it to the
others (hop 2), so that a rank that holds all items sends each only once. `deliver` moves the bytes.

All messages of both hops have a global order, and every rank processes its messages in this order,
as many at a time as fit into the buffer. The first unfinished message is then the first of both its
ranks, so there is no deadlock, and a rank never buffers more than the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

MESSAGES_IN_BUFFER = 4  # so that one is filled or emptied while others are in flight
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Assignment of items to parts, and of ranks to parts: all ranks of a part need its items."""

    part_of_rank: Places  # [N]
    part_of_item: Places  # [B]

    def wanted_by(self, rank: int) -> NDArray[np.bool_]:
        """[B]: whether this rank wants each item."""
        wanted: NDArray[np.bool_] = self.part_of_item == self.part_of_rank[rank]
        return wanted

    def ranks_of(self, item: int) -> Places:
        return np.flatnonzero(self.part_of_rank == self.part_of_item[item])


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `end` of an item."""

    item: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two ranks and the pieces that it consists of."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.end - piece.start for piece in self.pieces)


class Delivery:
    """Plan of which rank sends which item to which rank; equal on all ranks.

    Args:
        holders: [B], the rank that has each item.
        nbytes: [B].
        sharings: An item goes to the ranks of its part in each of them.
        buffer_size: Maximum bytes in flight per rank.
    """

    def __init__(
        self, holders: Places, nbytes: Places, sharings: Sequence[Sharing], *, buffer_size: int
    ) -> None:
        self.holders = holders
        self.nbytes = nbytes
        self.sharings = sharings
        self.buffer_size = buffer_size
        self.message_size = max(1, buffer_size // MESSAGES_IN_BUFFER)
        self.num_ranks = sharings[0].part_of_rank.size
        self.first = self._first_receivers()

    def _first_receivers(self) -> Places:
        """[B], the rank that each item goes to first: its holder if that needs it, otherwise the
        ranks of its part round-robin, which distributes the work of hop 2."""
        own = self.sharings[0]
        first = np.empty_like(self.holders)
        for part in np.unique(own.part_of_item):
            items = np.flatnonzero(own.part_of_item == part)
            ranks = np.flatnonzero(own.part_of_rank == part)
            first[items] = ranks[np.arange(items.size) % ranks.size]
        stays = np.zeros(self.holders.size, dtype=bool)
        for sharing in self.sharings:
            stays |= sharing.part_of_rank[self.holders] == sharing.part_of_item
        return np.where(stays, self.holders, first)

    def wanted_by(self, rank: int) -> NDArray[np.bool_]:
        """[B]: whether this rank wants each item."""
        return np.logical_or.reduce([sharing.wanted_by(rank) for sharing in self.sharings])

    def hops(self, rank: int) -> list[list[Message]]:
        """This rank's messages of each hop, in the global order."""
        return [
            self._messages(rank, self._items_of_hop_one(rank)),
            self._messages(rank, self._items_of_hop_two(rank)),
        ]

    def _items_of_hop_one(self, rank: int) -> dict[tuple[int, int], list[int]]:
        """Items that this rank sends or receives, by (source, destination)."""
        streams: dict[tuple[int, int], list[int]] = {}
        is_local = (self.holders == rank) | (self.first == rank)
        for item in np.flatnonzero(is_local & (self.holders != self.first)).tolist():
            pair = (int(self.holders[item]), int(self.first[item]))
            streams.setdefault(pair, []).append(item)
        return streams

    def _items_of_hop_two(self, rank: int) -> dict[tuple[int, int], list[int]]:
        """As `_items_of_hop_one`, from the first receivers to the others."""
        streams: dict[tuple[int, int], list[int]] = {}
        # what this rank received first, and sends on to all others that want it
        for item in np.flatnonzero(self.first == rank).tolist():
            wanting = np.unique(np.concatenate([s.ranks_of(item) for s in self.sharings]))
            for receiver in wanting[wanting != rank].tolist():
                streams.setdefault((rank, receiver), []).append(item)
        # what this rank wants and another one received first
        for item in np.flatnonzero(self.wanted_by(rank) & (self.first != rank)).tolist():
            streams.setdefault((int(self.first[item]), rank), []).append(item)
        return streams

    def _messages(self, rank: int, streams: dict[tuple[int, int], list[int]]) -> list[Message]:
        """Messages in the global order: by distance between the ranks, so that many pairs
        communicate concurrently, then by source."""

        def order(pair: tuple[int, int]) -> tuple[int, int]:
            return (pair[1] - pair[0]) % self.num_ranks, pair[0]

        messages: list[Message] = []
        for pair in sorted(streams, key=order):
            messages += (Message(*pair, pieces) for pieces in self._split(sorted(streams[pair])))
        return messages

    def _split(self, items: Sequence[int]) -> Iterator[tuple[Piece, ...]]:
        """Pack items into messages of `message_size`; yields the pieces of each."""
        pieces: list[Piece] = []
        room = self.message_size
        for item in items:
            start = 0
            size = int(self.nbytes[item])
            while start < size:
                end = min(size, start + room)
                pieces.append(Piece(item, start, end))
                room -= end - start
                start = end
                if not room:
                    yield tuple(pieces)
                    pieces = []
                    room = self.message_size
        if pieces:
            yield tuple(pieces)


@dataclass(slots=True)
class Traffic:
    """Bytes and messages that one rank has sent and received."""

    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    largest_buffer: int = 0  # maximum bytes in flight


class Work(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Sends messages between ranks, in order within each pair."""

    def send(self, buffer: Tensor, destination: int) -> Work: ...

    def receive(self, buffer: Tensor, source: int) -> Work: ...


class GroupTransport:
    """Transport over a process group of all ranks, for tensors in host memory."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def send(self, buffer: Tensor, destination: int) -> Work:
        work: Work | None = dist.isend(buffer, destination, group=self._group)
        assert work is not None
        return work

    def receive(self, buffer: Tensor, source: int) -> Work:
        work: Work | None = dist.irecv(buffer, source, group=self._group)
        assert work is not None
        return work


@dataclass(frozen=True, slots=True)
class _Pending:
    message: Message
    buffer: Tensor
    work: Work


def deliver(
    delivery: Delivery,
    rank: int,
    pack: Callable[[int], Tensor],
    take: Callable[[int, Tensor], None],
    transport: Transport,
) -> Traffic:
    """Send and receive this rank's messages. Collective.

    Args:
        delivery: Equal on all ranks.
        rank: This rank.
        pack: Returns the bytes [n] uint8 of an item that this rank holds or has received.
        take: Called with each item that this rank receives, and its bytes.
        transport: Sends the messages.

    Returns:
        Statistics of this rank.
    """
    traffic = Traffic()
    for messages in delivery.hops(rank):
        sender = _Sender(pack)
        receiver = _Receiver(delivery, take)
        _exchange(messages, rank, delivery, sender, receiver, transport, traffic)
    return traffic


class _Sender:
    """Fills buffers. An item is packed once for all its messages to a rank."""

    def __init__(self, pack: Callable[[int], Tensor]) -> None:
        self._pack = pack
        self._item = -1
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, buffer: Tensor, pieces: Sequence[Piece]) -> None:
        filled = 0
        for piece in pieces:
            if piece.item != self._item:
                self._item = piece.item
                self._bytes = self._pack(piece.item)
            size = piece.end - piece.start
            buffer[filled : filled + size] = self._bytes[piece.start : piece.end]
            filled += size


class _Receiver:
    """Empties buffers; holds partially received items."""

    def __init__(self, delivery: Delivery, take: Callable[[int, Tensor], None]) -> None:
        self._nbytes = delivery.nbytes
        self._take = take
        self._partial: dict[int, Tensor] = {}

    def empty(self, buffer: Tensor, pieces: Sequence[Piece]) -> None:
        taken = 0
        for piece in pieces:
            size = int(self._nbytes[piece.item])
            if piece.item not in self._partial:
                self._partial[piece.item] = torch.empty(size, dtype=torch.uint8)
            length = piece.end - piece.start
            self._partial[piece.item][piece.start : piece.end] = buffer[taken : taken + length]
            taken += length
            if piece.end == size:
                self._take(piece.item, self._partial.pop(piece.item))


def _exchange(
    messages: Sequence[Message],
    rank: int,
    delivery: Delivery,
    sender: _Sender,
    receiver: _Receiver,
    transport: Transport,
    traffic: Traffic,
) -> None:
    in_flight: deque[_Pending] = deque()
    in_flight_bytes = 0

    def finish() -> None:
        nonlocal in_flight_bytes
        oldest = in_flight.popleft()
        oldest.work.wait()
        in_flight_bytes -= oldest.buffer.numel()
        if oldest.message.destination == rank:
            receiver.empty(oldest.buffer, oldest.message.pieces)

    for message in messages:
        size = message.nbytes
        while in_flight and in_flight_bytes + size > delivery.buffer_size:
            finish()
        buffer = torch.empty(size, dtype=torch.uint8)
        in_flight_bytes += size
        traffic.largest_buffer = max(traffic.largest_buffer, in_flight_bytes)
        if message.source == rank:
            sender.fill(buffer, message.pieces)
            work = transport.send(buffer, message.destination)
            traffic.sent += size
            traffic.messages_sent += 1
        else:
            work = transport.receive(buffer, message.source)
            traffic.received += size
            traffic.messages_received += 1
        in_flight.append(_Pending(message, buffer, work))
    while in_flight:
        finish()
