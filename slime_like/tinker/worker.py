"""The workers' loop: rank 0 receives commands from the API process, all ranks execute them, and an
error on one rank is an error on all."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.data.tokenizer import load_tokenizer
from slime_like.distributed.failure_report import explain, looks_lost
from slime_like.errors import RunError
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.startup import Say
from slime_like.tinker import codec
from slime_like.tinker.errors import Failed, Refused
from slime_like.tinker.fingerprint import fingerprint_of
from slime_like.tinker.worker_backend import ModelHost
from slime_like.tinker.worker_rpc import LINK_FILE

logger = logging.getLogger(__name__)

# interval of rank 0's keep-alive broadcasts, so that idle collectives do not time out
IDLE_S = 30.0
START_S = 120.0  # for the API process to start
AGREE_S = 10.0  # for the other ranks to report on a command that failed on this one


class Worker:
    """The command loop of one rank. host: executes commands."""

    def __init__(self, host: ModelHost, layout: ParallelLayout) -> None:
        self.host, self.layout = host, layout
        self._number = 0  # of the command, equal on all ranks

    def serve(self, source: CommandSource | None) -> None:
        """Execute commands until the source ends. source: on rank 0 only."""
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

    def execute(self, command: dict[str, object]) -> dict[str, Any]:
        """Execute a command on all ranks; returns the response for the API process. Raises RunError
        if the ranks cannot agree on the outcome: some of them are then stuck in a collective."""
        self._number += 1
        value, error = None, None
        try:
            value = self.host.execute(command)
        except Exception as raised:
            error = raised
        outcome = self._agree(error)
        if outcome is None:
            return {"ok": True, "value": value}
        broken = self._recover(command, outcome)
        return {
            "ok": False,
            "category": "server" if broken else outcome["category"],
            "error": outcome["error"],
            "broken": broken,
        }

    def _recover(self, command: dict[str, Any], outcome: dict[str, Any]) -> bool:
        """Undo a failed command; returns whether its model is lost."""
        never_made = command["op"] == "create" and outcome["category"] == "user"
        if "model" not in command or never_made:
            return False
        # the client knows of a failed step; after a failed pass the next step lacks gradients
        missing = outcome["error"] if command["op"] == "pass" else ""
        lost = self.host.recover(command["model"], outcome["stage"], missing)
        return lost or command["model"] not in self.host.models

    def _agree(self, error: Exception | None) -> dict[str, object] | None:
        """Agree on the outcome of a command.

        The ranks communicate through the store of their process group, because a failed rank may
        have left the others in a collective.

        Returns:
            None on success; otherwise error, category and stage (the furthest of all ranks).

        Raises:
            RunError: Some rank does not respond, or was interrupted in a collective.
        """
        explained = is_of_user(error) or is_out_of_memory(error) or isinstance(error, Failed)
        if error is not None and not explained:
            traceback.print_exception(error)
        local: dict[str, Any] = {
            "error": None if error is None else words_of(error),
            "user": error is None or is_of_user(error),
            "lost": self.layout.world_size > 1 and error is not None and looks_lost(error),
            "stage": self.host.stage,
        }
        found = {self.layout.rank: local}
        if self.layout.world_size > 1:
            found = self._exchange(local)
        failed = {rank: o for rank, o in sorted(found.items()) if o["error"] is not None}
        if not failed:
            return None
        if any(o["lost"] for o in failed.values()):  # no later collective would work
            raise RunError(cause_of(failed))
        everybody = len(failed) == self.layout.world_size
        user = everybody and all(o["user"] for o in failed.values())
        return {
            "category": "user" if user else "server",
            "error": next(iter(failed.values()))["error"] if everybody else cause_of(failed),
            "stage": max(o["stage"] for o in found.values()),
        }

    def _exchange(self, local: dict[str, object]) -> dict[int, dict[str, object]]:
        """Exchange the outcomes of a command; returns them by rank. Raises RunError."""
        store: dist.Store = dist.distributed_c10d._get_default_store()
        store.set(self._key(self.layout.rank), json.dumps(local))
        self._forget(store)
        deadline: float | None = None
        while True:
            found = self._reported(store)
            if len(found) == self.layout.world_size:
                return found
            failed = {rank: o for rank, o in found.items() if o["error"] is not None}
            if failed and deadline is None:
                deadline = time.monotonic() + AGREE_S
            if deadline is not None and time.monotonic() > deadline:
                silent = set(range(self.layout.world_size)) - found.keys()
                raise RunError(
                    f"{cause_of(failed)}; no answer from rank {', '.join(map(str, sorted(silent)))}, "
                    "which may wait for it in a collective"
                )
            time.sleep(0.0005)

    def _reported(self, store: dist.Store) -> dict[int, dict[str, object]]:
        return {
            rank: json.loads(store.get(self._key(rank)))
            for rank in range(self.layout.world_size)
            if store.check([self._key(rank)])
        }

    def failure_elsewhere(self) -> str | None:
        """Error that another rank has reported for the current command, if any."""
        if self.layout.world_size == 1:
            return None
        with contextlib.suppress(RuntimeError):
            found = self._reported(dist.distributed_c10d._get_default_store())
            failed = {rank: o for rank, o in sorted(found.items()) if o["error"] is not None}
            return cause_of(failed) if failed else None
        return None

    def _key(self, rank: int, back: int = 0) -> str:
        return f"slime_like/tinker/{self._number - back}/{rank}"

    def _forget(self, store: dist.Store) -> None:
        """Delete the outcome of two commands ago, which every rank has read."""
        if self._number > 2:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(self._key(self.layout.rank, back=2))


def is_of_user(error: BaseException | None) -> bool:
    return isinstance(error, Refused | ValueError | OSError)


def cause_of(failed: Mapping[int, Mapping[str, object]]) -> str:
    """The root failure, with its rank."""
    rank, first = min(failed.items(), key=lambda item: (item[1]["lost"], item[0]))
    return f"rank {rank}: {first['error']}"


def words_of(error: BaseException) -> str:
    if is_out_of_memory(error):
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "MemoryError"
        return f"out of memory ({reason[:300]}); send fewer or shorter sequences, or lower --max-tokens-per-gpu"
    ours = isinstance(error, Refused | ValueError | OSError | RunError | Failed)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the GPU or the host ran out of memory; torch reports the latter as RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


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
    """Rank 0's connection to the API process, which it starts, and restarts when it exits."""

    def __init__(self, run: RunConfig, facts: Callable[[], dict[str, object]]) -> None:
        self.folder = Path(run.server.server_dir).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        self._fingerprint = fingerprint_of(run)
        self._command = [
            sys.executable,
            "-m",
            "slime_like.tinker.api_process",
            str(run.world_size),
            *run.argv,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._last: dict[str, object] | None = None
        self._starts: list[float] = []
        self.busy = False

    def next(self) -> bytes:
        """The next command, or "idle" after `IDLE_S`. Raises RunError if the API process cannot be
        kept running."""
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
                time.sleep(0.1)
                continue
            self._last, self.busy = None, True
            return frame

    def answer(self, message: dict[str, Any]) -> None:
        """Send a response. It is kept until the next command, for an API process that has
        restarted."""
        self._last, self.busy = message, False
        assert self._socket is not None
        try:
            self._socket.sendall(codec.framed(codec.encode(message)))
        except OSError:
            self._close()

    def close(self, reason: str, *, goodbye: bool) -> None:
        """Disconnect. goodbye: the API process exits too; otherwise it informs clients and waits
        for other workers for a while."""
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
            self._socket.settimeout(None)  # no timeout within a frame
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        """Connect to a running API process (which may have outlived earlier workers), or start
        one."""
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
            ours = told.get("fingerprint") == self._fingerprint
            opened = socket.create_connection(("127.0.0.1", told["port"]), timeout=5)
        except (OSError, ValueError, KeyError):
            return None
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            hello = {
                "token": told["token"],
                "fingerprint": self._fingerprint,
                "facts": self._facts(),
                "last": self._last,
            }
            opened.sendall(codec.framed(codec.encode(hello)))
        except OSError:
            opened.close()
            return None
        if not ours:  # the API process sees this in our hello as well, and exits
            logger.info(
                "slime_like.tinker: the API process that is there has another command line; "
                "a new one takes its place"
            )
            opened.close()
            return None
        return opened


def facts_of(host: ModelHost) -> dict[str, object]:
    """What the API process needs to know about the workers."""
    return {"layout": host.layout.describe(), "models": sorted(host.models)}


def serve(run: RunConfig, layout: ParallelLayout, startup: Say = lambda what: None) -> None:
    """Run a rank of the server. startup: called with the name of each startup phase."""
    startup("importing transformers, loading the tokenizer and the base model")
    assert run.model.hf_checkpoint is not None, "checked on the command line"
    tokenizer = load_tokenizer(  # before building the model
        run.model.hf_checkpoint,
        vocab_size=run.gpt.vocab_size,
        trust_remote_code=run.model.trust_remote_code,
    )
    host = ModelHost(run, layout, tokenizer)
    worker = Worker(host, layout)
    source = CommandSource(run, lambda: facts_of(host)) if layout.rank == 0 else None
    startup("starting the API process")
    reason, goodbye = "they were stopped", True
    try:
        worker.serve(source)
    except Terminated:  # also how torchrun ends this rank when another one died
        reason = worker.failure_elsewhere() or "they were terminated"
        goodbye = source is None or (layout.world_size == 1 and not source.busy)
        raise
    except Exception as error:
        reason, goodbye = words_of(explain(error, layout.world_size)), False
        raise
    finally:
        if source is not None:
            source.close(reason, goodbye=goodbye)
        host.close()


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM."""


__all__: Sequence[str] = ("CommandSource", "Worker", "serve")
