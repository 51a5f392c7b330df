"""The workers' command loop: rank 0 receives commands from the API process, all ranks execute them,
and an error on one rank is an error on all."""

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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.data.tokenizer import load_tokenizer
from slime_like.distributed.connections import can_renew, close_connections, renew_groups
from slime_like.distributed.failure_report import explain, looks_lost
from slime_like.errors import RunError
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.startup import Say
from slime_like.tinker import codec
from slime_like.tinker.errors import Failed, Refused, ServersFailed
from slime_like.tinker.factory import make_model_host
from slime_like.tinker.fingerprint import fingerprint_of
from slime_like.tinker.worker_backend import ModelHost
from slime_like.tinker.worker_rpc import LINK_FILE

logger = logging.getLogger(__name__)

# interval of rank 0's keep-alive broadcasts, so that idle collectives do not time out
IDLE_S = 30.0
START_S = 120.0  # for the API process to start
# for the other ranks to report on a command that failed on this one: before it frees them from the
# collective in which they may wait for it, and after that
FREE_S = 0.5
AGREE_S = 10.0


class CommandOutcome(TypedDict):
    """What a rank reports about a command."""

    error: str | None  # message, or None
    user: bool  # whether the client has to act on it
    common: bool  # see `Failed`
    lost: bool  # it was interrupted in a collective
    stage: int  # see `worker_backend`


@dataclass(frozen=True, slots=True)
class Failure:
    """The common outcome of a failed command."""

    category: str  # user or server
    error: str
    stage: int  # the furthest of all ranks
    common: bool = False  # see `Failed`


class ModelWorker:
    """The command loop of one rank. host: executes commands."""

    def __init__(self, host: ModelHost, layout: ParallelLayout) -> None:
        self.host = host
        self.layout = layout
        self._sequence = 0  # commands so far, equal on all ranks
        # whether a rank closed its connections for the current command: this one, then any
        self._closed = False

    def serve(self, source: CommandSource | None) -> None:
        """Execute commands until the source ends. source: on rank 0 only."""
        while True:
            frame = source.next() if source is not None else None
            command = codec.decode(broadcast_frame(frame))
            if command["op"] == "stop":
                return
            if command["op"] == "idle":
                continue
            response = self.execute(command)
            if source is not None:
                source.respond({"id": command["id"], **response})

    def execute(self, command: codec.Message) -> codec.Message:
        """Execute a command on all ranks; returns the response for the API process. Raises RunError
        if the ranks cannot agree on the outcome: some of them are then stuck in a collective."""
        self._sequence += 1
        value = None
        error = None
        try:
            value = self.host.execute(command)
        except Exception as raised:
            error = raised
        failure = self._agree(error)
        if failure is None:
            return {"ok": True, "value": value}
        broken = self._recover(command, failure)
        category = "server" if broken else failure.category
        told = {"category": category, "error": failure.error, "common": failure.common}
        return {"ok": False, "broken": broken, **told}

    def _recover(self, command: codec.Message, failure: Failure) -> bool:
        """Undo a failed command; returns whether its model is lost."""
        never_created = command["op"] == "create" and failure.category == "user"
        if "model" not in command or never_created:
            return False
        lost = self.host.recover(command["model"], failure.stage)
        return lost or command["model"] not in self.host.models

    def _agree(self, error: Exception | None) -> Failure | None:
        """Agree on the outcome of a command; None on success.

        The ranks communicate through the store of their process group, because a failed rank may
        have left the others in a collective.

        Raises:
            RunError: Some rank does not respond, or was interrupted in a collective.
        """
        explained = is_user_error(error) or is_out_of_memory(error) or isinstance(error, Failed)
        if error is not None and not explained:
            traceback.print_exception(error)
        local: CommandOutcome = {
            "error": None if error is None else error_message(error),
            "user": error is None or is_user_error(error),
            "common": is_common(error),
            "lost": self.layout.world_size > 1 and error is not None and looks_lost(error),
            "stage": self.host.stage,
        }
        outcomes = {self.layout.rank: local}
        if self.layout.world_size > 1:
            outcomes = self._exchange(local)
        failed = failed_only(outcomes)
        if not failed:
            return None
        left_alone = self._closed or any(o["lost"] for o in failed.values())
        if left_alone:
            self._renew_connections(root_failure(failed))
        stage = max(o["stage"] for o in outcomes.values())
        if left_alone or len(failed) < self.layout.world_size:
            return Failure("server", root_failure(failed), stage)
        category = "user" if all(o["user"] for o in failed.values()) else "server"
        common = all(o["common"] for o in failed.values())
        return Failure(category, str(next(iter(failed.values()))["error"]), stage, common)

    def _exchange(self, local: CommandOutcome) -> dict[int, CommandOutcome]:
        """Exchange the outcomes of a command; returns them by rank. Raises RunError."""
        store: dist.Store = dist.distributed_c10d._get_default_store()
        store.set(self._key(self.layout.rank), json.dumps(local))
        self._delete_old_outcome(store)
        self._closed = False
        free = time.monotonic() + FREE_S
        deadline: float | None = None
        while True:
            outcomes = self._reported(store)
            if len(outcomes) == self.layout.world_size:
                self._closed = bool(failed_only(outcomes)) and self._any_closed(store)
                return outcomes
            failed = failed_only(outcomes)
            if failed and deadline is None:
                deadline = time.monotonic() + FREE_S + AGREE_S
            if local["error"] and not self._closed and time.monotonic() > free and can_renew():
                close_connections()
                self._closed = True
            if deadline is not None and time.monotonic() > deadline:
                silent = sorted(set(range(self.layout.world_size)) - outcomes.keys())
                raise RunError(
                    f"{root_failure(failed)}; no answer from rank {', '.join(map(str, silent))}, "
                    "which may be stuck in a collective"
                )
            time.sleep(0.0005)

    def _any_closed(self, store: dist.Store) -> bool:
        """Whether some rank closed its connections for this command. All have reported, so none
        will any more."""
        store.set(self._key(self.layout.rank) + "/closed", str(int(self._closed)))
        keys = [self._key(rank) + "/closed" for rank in range(self.layout.world_size)]
        store.wait(keys, timedelta(seconds=AGREE_S))
        return any(store.get(key) == b"1" for key in keys)

    def _renew_connections(self, failure: str) -> None:
        """Go on after a failure that left ranks in a collective. Raises RunError with the failure
        where that cannot be."""
        if not can_renew() and not self._closed:
            raise RunError(failure)
        try:
            renew_groups()
        except RunError as error:
            raise RunError(f"{failure}; {error}") from error
        self._closed = False

    def _reported(self, store: dist.Store) -> dict[int, CommandOutcome]:
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
            failed = failed_only(self._reported(dist.distributed_c10d._get_default_store()))
            return root_failure(failed) if failed else None
        return None

    def _key(self, rank: int, back: int = 0) -> str:
        return f"slime_like/tinker/{self._sequence - back}/{rank}"

    def _delete_old_outcome(self, store: dist.Store) -> None:
        """Delete the outcome of two commands ago, which every rank has read."""
        if self._sequence > 2:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(self._key(self.layout.rank, back=2))
                store.delete_key(self._key(self.layout.rank, back=2) + "/closed")


def is_user_error(error: BaseException | None) -> bool:
    return isinstance(error, Refused | ValueError | OSError)


def is_common(error: BaseException | None) -> bool:
    """See `Failed`."""
    return isinstance(error, ServersFailed)


def failed_only(outcomes: Mapping[int, CommandOutcome]) -> dict[int, CommandOutcome]:
    return {rank: o for rank, o in sorted(outcomes.items()) if o["error"] is not None}


def root_failure(failed: Mapping[int, CommandOutcome]) -> str:
    """Message of the rank that failed first: not of one that was interrupted in a collective."""
    rank, first = min(failed.items(), key=lambda item: (item[1]["lost"], item[0]))
    return f"rank {rank}: {first['error']}"


def error_message(error: BaseException) -> str:
    if is_out_of_memory(error):
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "MemoryError"
        return (
            f"out of memory ({reason[:300]}); send fewer or shorter sequences, or lower "
            "--max-tokens-per-gpu"
        )
    explained = isinstance(error, Refused | ValueError | OSError | RunError | Failed)
    return str(error) if explained else f"{type(error).__name__}: {error}"


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

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        command: Sequence[str],
        facts: Callable[[], dict[str, object]],
    ) -> None:
        """
        Args:
            folder: --server-dir.
            fingerprint: Of the settings; see `fingerprint_of`.
            command: Starts the API process.
            facts: What the API process needs to know about the workers.
        """
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        self._fingerprint = fingerprint
        self._command = list(command)
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
            self._last = None
            self.busy = True
            return frame

    def respond(self, message: codec.Message) -> None:
        """Send a response. It is kept until the next command, for an API process that has
        restarted."""
        self._last = message
        self.busy = False
        assert self._socket is not None
        try:
            self._socket.sendall(codec.framed(codec.encode(message)))
        except OSError:
            self._close()

    def close(self, reason: str, *, goodbye: bool) -> None:
        """Disconnect. goodbye: the API process exits too; otherwise it informs clients and waits
        for other workers for a while."""
        if self._socket is not None:
            farewell = codec.encode({"reason": reason, "goodbye": goodbye})
            with contextlib.suppress(OSError):
                self._socket.sendall(codec.framed(farewell))
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
            self._socket = self._try_to_connect()
            if self._socket is not None:
                return
            if self._process is None or self._process.poll() is not None:
                self._start()
            time.sleep(0.1)
        raise RunError(f"the API process did not start within {START_S:g} s; see its log above")

    def _start(self) -> None:
        now = time.monotonic()
        self._starts = [t for t in self._starts if now - t < 60.0] + [now]
        if self._process is not None and (self._process.returncode == 2 or len(self._starts) > 3):
            raise RunError("the API process exits as soon as it is started; see its log above")
        (self.folder / LINK_FILE).unlink(missing_ok=True)
        # in its own session, because torchrun kills the session of a rank that fails
        self._process = subprocess.Popen(self._command, start_new_session=True)

    def _try_to_connect(self) -> socket.socket | None:
        try:
            link = json.loads((self.folder / LINK_FILE).read_text(encoding="utf-8"))
            same_settings = link.get("fingerprint") == self._fingerprint
            connection = socket.create_connection(("127.0.0.1", link["port"]), timeout=5)
        except (OSError, ValueError, KeyError):
            return None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            hello = {
                "token": link["token"],
                "fingerprint": self._fingerprint,
                "facts": self._facts(),
                "last": self._last,
            }
            connection.sendall(codec.framed(codec.encode(hello)))
        except OSError:
            connection.close()
            return None
        if not same_settings:  # the API process sees this in our hello as well, and exits
            logger.info("replacing a running API process that has another command line")
            connection.close()
            return None
        return connection


def command_source(config: RunConfig, facts: Callable[[], dict[str, object]]) -> CommandSource:
    """The connection to the API process of a server."""
    module = "slime_like.tinker.api_process"
    command = [sys.executable, "-m", module, str(config.world_size), *config.argv]
    folder = Path(config.server.server_dir)
    return CommandSource(folder, fingerprint_of(config), command, facts)


def serve(config: RunConfig, layout: ParallelLayout, startup: Say = lambda what: None) -> None:
    """Run a rank of the server. startup: called with the name of each startup phase."""
    startup("importing transformers, loading the tokenizer and the base model")
    assert config.model.hf_checkpoint is not None, "checked on the command line"
    tokenizer = load_tokenizer(  # before building the model
        config.model.hf_checkpoint,
        vocab_size=config.gpt.vocab_size,
        trust_remote_code=config.model.trust_remote_code,
    )
    host = make_model_host(config, layout, tokenizer)
    worker = ModelWorker(host, layout)
    source = command_source(config, host.describe) if layout.rank == 0 else None
    startup("starting the API process")
    reason = "they were stopped"
    goodbye = True
    try:
        worker.serve(source)
    except Terminated:  # also how torchrun ends this rank when another one died
        reason = worker.failure_elsewhere() or "they were terminated"
        goodbye = source is None or (layout.world_size == 1 and not source.busy)
        raise
    except Exception as error:
        reason = error_message(explain(error, layout.world_size))
        goodbye = False
        raise
    finally:
        if source is not None:
            source.close(reason, goodbye=goodbye)
        host.close()


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM."""
