"""Process groups of one sender and all ranks of all servers: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.servers.http import RequestFailed
from slime_like.servers.nodes import address_towards
from slime_like.servers.server_api import JoinGroup, ServerApi, ServerCall
from slime_like.weight_sync.transports.overlap import queued_work, use_own_stream
from slime_like.weights.export_plan import TensorPlan

Call = Callable[[ServerCall], object]  # makes a call to one server
# a server rejects a bucket at once; if it accepts, it responds only after the broadcast
REFUSAL_S = 0.05
POLL_S = 0.0005  # a bucket may take a few milliseconds


class BroadcastFailed(RuntimeError):
    """Some servers did not take part. servers: their indices in the group, empty if unknown."""

    def __init__(self, message: str, servers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.servers = tuple(servers)


class GroupRendezvous:
    """Rendezvous store of the groups, in this process. It listens on one interface only; a store
    given by host name and port would listen on all."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """urls: servers that must be reachable through the interface."""
        self.address = address_towards(urls)
        self.timeout_s = timeout_s
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.address, 0))
            listener.listen(1024)
            self.port = int(listener.getsockname()[1])
            self.store = dist.TCPStore(
                self.address,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def connect(self) -> dist.Store:
        return connect(self.address, self.port, self.timeout_s)


def connect(address: str, port: int, timeout_s: float) -> dist.Store:
    """A separate connection to a `GroupRendezvous`, because waiting blocks a connection."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)


class Member:
    """This process as sender, rank 0, of a group outside the default world, created as SGLang does
    (dist.new_group cannot). Waits for the other members."""

    def __init__(
        self, name: str, store: dist.Store, world: int, backend: str, timeout_s: float
    ) -> None:
        from torch.distributed import distributed_c10d as c10d

        make: Any = (
            c10d._new_process_group_helper
        )  # the type of a group's name differs between versions of torch
        self._group, _ = make(
            world,
            0,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world)}

    def broadcast(self, flat: Tensor, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Broadcast a bucket. wait: blocks until the predicate it is given is true; an error from
        it ends the broadcast. Raises BroadcastFailed."""
        # NCCL makes its communicator in the first broadcast: that call itself blocks until all
        # members take part
        done = _in_thread(self._broadcast, flat, queued_work(flat.device))
        wait(done.done)
        try:
            done.result()
        except RuntimeError as error:
            raise BroadcastFailed(f"the broadcast failed: {str(error).splitlines()[0]}") from None

    def _broadcast(self, flat: Tensor, ready: torch.cuda.Event | None) -> None:
        use_own_stream(flat.device, ready)
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None
        while flat.is_cuda and not work.is_completed():  # its `wait` is one of the stream alone
            time.sleep(POLL_S)
        work.wait()

    def abandon(self) -> None:
        """Leave a group whose other side may be gone: nothing is waited for."""
        with contextlib.suppress(Exception):
            self._group.abort()
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self._group)


class BroadcastGroup:
    """A group of one sender and all ranks of all servers, driven by trainer rank 0, which calls the
    servers. The sender is rank 0 of the group; the ranks of server i follow those of server i - 1.

    Args:
        api: Of the servers.
        calls: Client of each server.
        sizes: Ranks of each server.
        sends_here: This process is the sender.
        stopped: Raises BroadcastFailed if a sender elsewhere has failed.

    Raises:
        BroadcastFailed: If joining takes longer than the rendezvous' time limit.
    """

    def __init__(
        self,
        name: str,
        rendezvous: GroupRendezvous,
        api: ServerApi,
        calls: Sequence[Call],
        sizes: Sequence[int],
        device: torch.device,
        *,
        sends_here: bool = True,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._api = api
        self._calls = list(calls)
        self._device = device
        self._timeout_s = rendezvous.timeout_s
        self._stopped = stopped
        self._in_update = False  # its servers have taken a bucket
        self._threads = ThreadPoolExecutor(
            max_workers=len(calls) + 1, thread_name_prefix="weight-update"
        )
        self._member: Member | None = None
        world = 1 + sum(sizes)
        backend = backend_of(device)
        where = f"joining the group at {rendezvous.address}:{rendezvous.port}"
        answers = []
        for i, call in enumerate(self._calls):
            first = 1 + sum(sizes[:i])
            group = JoinGroup(name, rendezvous.address, rendezvous.port, first, world, backend)
            answers.append(self._threads.submit(call, api.join(group)))
        if sends_here:
            joined = self._threads.submit(
                lambda: Member(name, rendezvous.connect(), world, backend, self._timeout_s)
            )
            self._wait(joined.done, answers, where)
            try:
                self._member = joined.result()
            except (RuntimeError, OSError) as error:
                raise BroadcastFailed(f"{where}: {str(error).splitlines()[0]}") from None
        else:
            self._wait(lambda: all(answer.done() for answer in answers), answers, where)
        self._check(answers, where, time.monotonic() + self._timeout_s)

    def send(
        self,
        tensors: Sequence[TensorPlan],
        flat: Tensor | None,
        version: int,
        *,
        is_last: bool,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """Send one bucket; returns when all servers have it. Raises BroadcastFailed within the time
        limit.

        Args:
            flat: Its bytes if this process is the sender.
            is_last: Last bucket of the update.
            stopped: See the class.
        """
        self._stopped = stopped
        receive = self._api.receive(self._name, tensors, version, is_last=is_last)
        deadline = time.monotonic() + self._timeout_s
        answers = [self._threads.submit(call, receive) for call in self._calls]
        what = "a bucket of weights"
        if self._member is None:
            self._wait(lambda: all(answer.done() for answer in answers), answers, what)
        else:
            assert flat is not None
            if not self._in_update:
                self._check_early_responses(answers, deadline)
            self._member.broadcast(
                flat.to(self._device), lambda done: self._wait(done, answers, what)
            )
        self._check(answers, what, deadline)
        self._in_update = not is_last

    def _check_early_responses(self, answers: Sequence[Future[object]], deadline: float) -> None:
        """A refusal that comes before the first bucket of an update costs no broadcast that nobody
        receives; later ones end their broadcast (`_wait`), and no bucket waits for them."""
        refusal = min(deadline, time.monotonic() + REFUSAL_S)
        while time.monotonic() < refusal and not any(answer.done() for answer in answers):
            time.sleep(POLL_S)
        if any(answer.done() for answer in answers):  # a response before the broadcast is a refusal
            self._check(
                [answer for answer in answers if answer.done()], "a bucket of weights", deadline
            )
            raise BroadcastFailed("a server answered an update before the weights were sent")

    def close(self) -> None:
        """Leave the group on both sides, as far as the servers respond."""
        leave = self._api.leave(self._name)
        left = [self._threads.submit(call, leave) for call in self._calls]
        for answer in left:
            with contextlib.suppress(RequestFailed, TimeoutError):
                answer.result(timeout=5)
        self.abandon()

    def abandon(self) -> None:
        """Leave a group whose other side may be gone: nothing is waited for."""
        if self._member is not None:
            self._member.abandon()
            self._member = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait(self, done: Callable[[], bool], answers: Sequence[Future[object]], what: str) -> None:
        """Wait until `done()`, a refusal by a server, or the time limit."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
            self._stopped()
            refused = [
                answer for answer in answers if answer.done() and answer.exception() is not None
            ]
            if refused:
                self._check(answers, what, time.monotonic(), only_done=True)
            if time.monotonic() > deadline:
                silent = [i for i, answer in enumerate(answers) if not answer.done()]
                raise BroadcastFailed(
                    f"{what}: not done within {self._timeout_s:g} s (--update-weight-timeout-s)",
                    silent,
                )
            time.sleep(POLL_S)

    def _check(
        self,
        answers: Sequence[Future[object]],
        what: str,
        deadline: float,
        *,
        only_done: bool = False,
    ) -> None:
        """Raise BroadcastFailed naming every server that refused or timed out."""
        problems: dict[int, str] = {}
        for i, answer in enumerate(answers):
            if only_done and not answer.done():
                continue
            try:
                answer.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                problems[i] = "no answer in time"
            except RequestFailed as failure:
                problems[i] = str(failure)
        if problems:
            raise BroadcastFailed(f"{what}: " + "; ".join(problems.values()), tuple(problems))


def _in_thread(
    function: Callable[[Tensor, torch.cuda.Event | None], None],
    flat: Tensor,
    ready: torch.cuda.Event | None,
) -> Future[None]:
    """Call a function in a thread that the end of this process does not wait for."""
    future: Future[None] = Future()

    def call() -> None:
        try:
            function(flat, ready)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="weight-broadcast", daemon=True).start()
    return future


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
