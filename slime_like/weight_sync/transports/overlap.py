"""Make the next bucket of weights while the one before is sent.

Buckets are made in the calling thread, because their collectives keep the order of the run's other
collectives; they are sent in a thread of the update. There are two at most: the one being sent, and
the one being made, which waits for the end of the other.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slime_like.weights.buckets import Bucket


class NotMade(RuntimeError):
    """The next bucket could not be made; the thread that makes them raises why."""


class Handover(Iterator[Bucket]):
    """Buckets as the sending thread takes them, each once it has dropped the one before."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = False  # the sending thread waits for a bucket
        self._next: _Made | None = None
        self._ended = False  # there are no more
        self._not_made = False
        self._sender_ended = False

    # --- in the thread that makes buckets

    def put(self, bucket: Bucket) -> bool:
        """Hand over a bucket when the one before is sent; False if the sending thread has ended."""
        made = _Made(bucket, queued_work(bucket.flat.device))
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._sender_ended)
            if self._sender_ended:
                return False
            self._next = made
            self._asked = False
            self._changed.notify_all()
        return True

    def end(self, *, not_made: bool = False) -> None:
        with self._changed:
            self._ended = True
            self._not_made = not_made
            self._changed.notify_all()

    # --- in the sending thread

    def __next__(self) -> Bucket:
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is not None or self._ended)
            made = self._next
            self._next = None
        if made is None:
            self.raise_if_not_made()
            raise StopIteration
        use_own_stream(made.bucket.flat.device, made.ready)
        return made.bucket

    def raise_if_not_made(self) -> None:
        """Raise NotMade if no bucket follows because of an error."""
        if self._not_made:
            raise NotMade("the next bucket of weights could not be made")

    def sender_ends(self) -> None:
        with self._changed:
            self._sender_ended = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Made:
    bucket: Bucket
    ready: torch.cuda.Event | None  # of the kernels that write it


def send_while_made(
    buckets: Iterator[Bucket],
    send: Callable[[Handover], None],
    not_made: Callable[[BaseException], None] = lambda error: None,
) -> None:
    """Make `buckets` here while `send` takes them in a thread. Returns when `send` has.

    Raises what `send` raises; `buckets` is then left where it is. If making a bucket raises, `send`
    gets NotMade from its next bucket, and the error is raised once it has ended.

    not_made: called with that error, to end what `send` may wait for.
    """
    handover = Handover()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            send(handover)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they keep the bucket that was sent
            errors.append(error)
        finally:
            handover.sender_ends()

    sending = threading.Thread(target=run, name="weight-sending", daemon=True)
    sending.start()
    try:
        taken = True
        while taken and (bucket := next(buckets, None)) is not None:
            taken = handover.put(bucket)
            del bucket  # it is the sending thread's: freed when it is sent
        handover.end()
        sending.join()
    except BaseException as error:
        handover.end(not_made=True)
        not_made(error)
        if isinstance(error, Exception):  # an interrupt does not wait for the servers
            error.add_note("while a bucket of weights was made for the servers")
            sending.join()
        raise
    if errors:
        raise errors[0]


def queued_work(device: torch.device) -> torch.cuda.Event | None:
    """On a GPU, an event after what this thread has queued there."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def use_own_stream(device: torch.device, ready: torch.cuda.Event | None) -> None:
    """On a GPU, what this thread queues from now on waits for `ready` alone, not for the next
    bucket, which another thread queues meanwhile. Whoever frees a bucket has waited for the end of
    its own work: the allocator knows only the stream of the other thread."""
    if ready is None:
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    torch.cuda.set_stream(stream)
