"""Weights to servers over a process group of rank 0 and every rank of every server: gloo between
CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime_like.rollout.engines.sglang.http import RequestFailed
from slime_like.weights.buckets import Bucket

Call = Callable[[str, dict[str, Any]], Any]  # (path, body) -> answer, of one server
# a server that refuses a bucket says so at once; one that takes it answers only after the broadcast
REFUSAL_S = 0.05
POLL_S = 0.002


class BroadcastFailed(RuntimeError):
    """Some servers did not take part. servers: their places in the group's list, empty where it is
    not known."""

    def __init__(self, message: str, servers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.servers = tuple(servers)


class BroadcastGroup:
    """Rank 0 is this process; server i has the ranks behind those of server i - 1.

    calls: how to reach each server. sizes: ranks of each server. Raises BroadcastFailed when they
    cannot meet within `timeout_s`.
    """

    def __init__(
        self, name: str, urls: Sequence[str], calls: Sequence[Call], sizes: Sequence[int], backend: str, device: torch.device, timeout_s: float
    ) -> None:  # fmt: skip
        self._name, self._calls, self._device, self._timeout_s = (
            name,
            list(calls),
            device,
            timeout_s,
        )
        self._threads = ThreadPoolExecutor(
            max_workers=len(urls), thread_name_prefix="weight-update"
        )
        self._group: Any = None
        address = address_towards(urls)
        world = 1 + sum(sizes)
        with (
            socket.socket() as listener
        ):  # on one interface: a store by host name and port would listen on all of them
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, 0))
            listener.listen(1024)
            port = listener.getsockname()[1]
            bodies = [
                {"master_address": address, "master_port": port, "rank_offset": 1 + sum(sizes[:i]), "world_size": world,
                 "group_name": name, "backend": backend}
                for i in range(len(urls))
            ]  # fmt: skip
            answers = [
                self._threads.submit(call, "/init_weights_update_group", body)
                for call, body in zip(self._calls, bodies, strict=True)
            ]
            meeting = self._threads_of_own().submit(
                self._join, address, port, listener.detach(), world, backend
            )
            self._wait(lambda: meeting.done(), answers, f"joining the group at {address}:{port}")
        try:
            self._group = meeting.result()
        except (RuntimeError, OSError) as error:
            raise BroadcastFailed(
                f"the servers did not join the group at {address}:{port}: {str(error).splitlines()[0]}"
            ) from None
        self._check(answers, "joining the group", time.monotonic() + timeout_s)

    def send(self, bucket: Bucket, version: int) -> None:
        """All servers have the bucket's weights when it returns. Raises BroadcastFailed, within the
        time limit."""
        body: dict[str, Any] = {
            "names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": self._name,
            "load_format": "flattened_bucket", "flush_cache": bucket.is_last,
        }  # fmt: skip
        if bucket.is_last:
            body["weight_version"] = str(version)
        deadline = time.monotonic() + self._timeout_s
        answers = [
            self._threads.submit(call, "/update_weights_from_distributed", body)
            for call in self._calls
        ]
        refusal = min(deadline, time.monotonic() + REFUSAL_S)
        while time.monotonic() < refusal and not any(answer.done() for answer in answers):
            time.sleep(POLL_S)
        if any(answer.done() for answer in answers):  # too early: nobody can have the weights yet
            self._check(
                [answer for answer in answers if answer.done()], "a bucket of weights", deadline
            )
            raise BroadcastFailed("a server answered an update before the weights were sent")
        flat = bucket.flat.to(self._device)
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None
        self._wait(lambda: work.is_completed(), answers, "a bucket of weights")
        try:
            work.wait()
        except RuntimeError as error:
            raise BroadcastFailed(f"the broadcast failed: {str(error).splitlines()[0]}") from None
        self._check(answers, "a bucket of weights", deadline)

    def close(self) -> None:
        """Leave the group, on both sides where the servers answer."""
        left = [
            self._threads.submit(call, "/destroy_weights_update_group", {"group_name": self._name})
            for call in self._calls
        ]
        for answer in left:
            with contextlib.suppress(RequestFailed, TimeoutError):
                answer.result(timeout=5)
        self.abandon()

    def abandon(self) -> None:
        """Leave a group whose other side may be gone: nothing is waited for."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._group.abort()
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self._group)
            self._group = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, address: str, port: int, listener: int, world: int, backend: str) -> Any:
        from torch.distributed import distributed_c10d as c10d

        limit = timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            address, port, world, is_master=True, timeout=limit, master_listen_fd=listener
        )
        # As SGLang's side makes it: a group beside the default one, which dist.new_group cannot be.
        make: Any = (
            c10d._new_process_group_helper
        )  # the type of a group's name differs between versions of torch
        group, _ = make(
            world,
            0,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(self._name, store),
            group_name=self._name,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        return group

    def _threads_of_own(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-update-join")

    def _wait(self, done: Callable[[], bool], answers: Sequence[Future[Any]], what: str) -> None:
        """Until `done`; a server that refuses meanwhile, or the time limit, ends the wait."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
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
        self, answers: Sequence[Future[Any]], what: str, deadline: float, *, only_done: bool = False
    ) -> None:
        """Raises BroadcastFailed naming every server that refused, or did not answer in time."""
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


def address_towards(urls: Sequence[str]) -> str:
    """This host's address as the servers see it; loopback when all of them are here."""
    for url in urls:
        host, port = urlsplit(url).hostname, urlsplit(url).port or 80
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # connecting sends nothing
            s.connect((host, port))
            if not str(s.getsockname()[0]).startswith("127."):
                return str(s.getsockname()[0])
    return "127.0.0.1"
