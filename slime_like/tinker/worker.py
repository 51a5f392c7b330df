"""The workers' loop: rank 0 takes commands from the API process, all ranks execute them, an error of one is an error of all."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.distributed.failure_report import explain
from slime_like.errors import RunError
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.tinker import codec
from slime_like.tinker.errors import Refused
from slime_like.tinker.worker_backend import ModelHost
from slime_like.tinker.worker_rpc import LINK_FILE

IDLE_S = 30.0  # between two signs of life of rank 0: a collective does not wait for ever
START_S = 120.0  # for the API process to come up
AGREE_S = 10.0  # for the other ranks to tell how a command went, once this one has failed
CHANGES_STATE = ("pass", "step", "load", "create")


class Worker:
    """One rank. host: executes commands."""

    def __init__(self, host: ModelHost, layout: ParallelLayout) -> None:
        self.host, self.layout = host, layout
        self._number = 0  # of the command, equal on all ranks

    def serve(self, source: CommandSource | None) -> None:
        """Until the source ends. source: on rank 0."""
        while True:
            frame = source.next() if source is not None else None
            frame = broadcast_frame(frame)
            command = codec.decode(frame)
            if command["op"] == "stop":
                return
            if command["op"] == "idle":
                continue
            answer = self.execute(command)
            if source is not None:
                source.answer({"id": command["id"], **answer})

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to a command, as the API process reads it. Raises RunError when the ranks do not agree on what happened: then some of
        them are in the middle of a collective, and nobody can go on."""
        self._number += 1
        value, error = None, None
        try:
            value = self.host.execute(command)
        except Exception as raised:
            error = raised
        told = self._agree(error)
        if told is None:
            return {"ok": True, "value": value}
        user = told["user"]
        broken = not user and command["op"] in CHANGES_STATE
        if broken and "model" in command:
            self.host.do_unload(command["model"])
        return {
            "ok": False,
            "category": "user" if user else "server",
            "error": told["text"],
            "broken": broken,
        }

    def _agree(self, error: Exception | None) -> dict[str, Any] | None:
        """What went wrong on any rank; None when nothing did. The ranks tell each other through the store of their process group, for one that
        failed may have left the others in a collective."""
        if error is not None and not isinstance(error, Refused | ValueError | OSError):
            traceback.print_exception(error)
        mine = (
            None
            if error is None
            else {
                "user": isinstance(error, Refused | ValueError | OSError),
                "text": words_of(error),
            }
        )
        if self.layout.world_size == 1:
            return mine
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(self._key(self.layout.rank), json.dumps(mine))
        self._forget(store)
        deadline = time.monotonic() + AGREE_S if error is not None else None
        found: dict[int, Any] = {}
        while len(found) < self.layout.world_size:
            for rank in range(self.layout.world_size):
                if rank not in found and store.check([self._key(rank)]):
                    found[rank] = json.loads(store.get(self._key(rank)))
            if (
                error is None
                and any(told is not None for told in found.values())
                and deadline is None
            ):
                deadline = time.monotonic() + AGREE_S
            if deadline is not None and time.monotonic() > deadline:
                silent = ", ".join(
                    str(rank) for rank in range(self.layout.world_size) if rank not in found
                )
                raise RunError(
                    f"rank {self.layout.rank}: {words_of(error) if error else 'another rank failed'}; no word from rank {silent}"
                )
            if len(found) < self.layout.world_size:
                time.sleep(0.0005)
        failed = [(rank, told) for rank, told in sorted(found.items()) if told is not None]
        if not failed:
            return None
        rank, told = failed[0]
        everybody = len(failed) == self.layout.world_size
        return {
            "user": all(t["user"] for _, t in failed) and everybody,
            "text": told["text"] if everybody else f"rank {rank}: {told['text']}",
        }

    def _key(self, rank: int, back: int = 0) -> str:
        return f"slime_like/tinker/{self._number - back}/{rank}"

    def _forget(self, store: Any) -> None:
        """Every rank has read what was told before the command before."""
        if self._number > 2:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(self._key(self.layout.rank, back=2))


def words_of(error: BaseException) -> str:
    ours = isinstance(error, Refused | ValueError | OSError | RunError)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def broadcast_frame(frame: bytes | None) -> bytes:
    """Rank 0's bytes on every rank."""
    if dist.get_world_size() == 1:
        assert frame is not None
        return frame
    device = device_of_this_process()
    size = torch.tensor([0 if frame is None else len(frame)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    if frame is None:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    else:
        data = torch.from_numpy(np.frombuffer(frame, dtype=np.uint8).copy()).to(device)
    dist.broadcast(data, 0)
    return data.cpu().numpy().tobytes()


class CommandSource:
    """Rank 0's connection to the API process, which it starts, and starts again when it ends."""

    def __init__(self, run: RunConfig, facts: Callable[[], dict[str, Any]]) -> None:
        self.folder = Path(run.server.server_dir).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        self._command = [
            sys.executable,
            "-m",
            "slime_like.tinker.api_process",
            str(run.world_size),
            *run.argv,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._last: dict[str, Any] | None = None
        self._starts: list[float] = []
        self.busy = False

    def next(self) -> bytes:
        """The next command, or a sign of life when there is none. Raises RunError when the API process cannot be kept up."""
        while True:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            try:
                self._socket.settimeout(IDLE_S)
                head = self._receive(codec.HEAD)
                self._socket.settimeout(None)
                frame = self._receive(codec.frame_size(head))
            except TimeoutError:
                return codec.encode({"op": "idle"})
            except OSError:
                self._close()
                continue
            self._last, self.busy = None, True
            return frame

    def answer(self, message: dict[str, Any]) -> None:
        """Kept until the next command: an API process that has ended in the meantime asks for it when it is there again."""
        self._last, self.busy = message, False
        assert self._socket is not None
        try:
            self._socket.sendall(codec.framed(codec.encode(message)))
        except OSError:
            self._close()

    def close(self, reason: str, *, goodbye: bool) -> None:
        """The workers end. goodbye: the API process is to end too; else it tells clients, and waits for other workers for a while."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(
                    codec.framed(codec.encode({"reason": reason, "goodbye": goodbye}))
                )
            self._close()
        if goodbye and self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.terminate()

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        parts: list[bytes] = []
        missing = size
        while missing:
            part = self._socket.recv(min(missing, 2**20))
            if not part:
                raise ConnectionError("closed")
            self._socket.settimeout(None)  # what has begun comes whole
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        """To an API process that is there (one that outlived the workers before us), or to a new one."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (opened := self._try()) is not None:
                self._socket = opened
                return
            if self._process is None or self._process.poll() is not None:
                self._start()
            time.sleep(0.1)
        raise RunError(
            f"the API process did not come up within {START_S:g} s; see its messages above"
        )

    def _start(self) -> None:
        now = time.monotonic()
        self._starts = [t for t in self._starts if now - t < 60.0] + [now]
        if self._process is not None and (self._process.returncode == 2 or len(self._starts) > 3):
            raise RunError("the API process ends as soon as it is started; see its messages above")
        (self.folder / LINK_FILE).unlink(missing_ok=True)
        self._process = subprocess.Popen(
            self._command, start_new_session=True
        )  # torchrun kills the session of a rank that fails

    def _try(self) -> socket.socket | None:
        try:
            told = json.loads((self.folder / LINK_FILE).read_text(encoding="utf-8"))
            opened = socket.create_connection(("127.0.0.1", told["port"]), timeout=5)
        except (OSError, ValueError, KeyError):
            return None
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            opened.sendall(
                codec.framed(
                    codec.encode(
                        {"token": told["token"], "facts": self._facts(), "last": self._last}
                    )
                )
            )
        except OSError:
            opened.close()
            return None
        return opened


def facts_of(host: ModelHost) -> dict[str, Any]:
    """What the API process has to know of the workers."""
    return {"layout": host.layout.describe(), "models": sorted(host.models)}


def serve(run: RunConfig, layout: ParallelLayout, tell: Callable[[str], None]) -> None:
    """The life of a rank."""
    host = ModelHost(run, layout, tell)
    worker = Worker(host, layout)
    source = CommandSource(run, lambda: facts_of(host)) if layout.rank == 0 else None
    reason, goodbye = "they were stopped", True
    try:
        worker.serve(source)
    except Terminated:  # which is also how torchrun ends this rank when another has died
        reason, goodbye = (
            "they were terminated",
            source is None or (layout.world_size == 1 and not source.busy),
        )
        raise
    except Exception as error:
        reason, goodbye = words_of(explain(error, layout.world_size)), False
        raise
    finally:
        if source is not None:
            source.close(reason, goodbye=goodbye)
        host.close()


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


__all__: Sequence[str] = ("CommandSource", "Worker", "serve")
