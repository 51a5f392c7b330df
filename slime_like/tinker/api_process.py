"""The API process: serves HTTP to clients, a loopback port to the workers, and keeps the journal.
Rank 0 of the workers starts it (worker.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

import uvicorn

from arguments.cuda import cuda_available
from arguments.hf.lora_modules import padded_mlp, without_attention
from arguments.hf.model import read_hf_model
from arguments.parse import SERVER, parse_or_exit
from arguments.rules.server import valid_keys
from arguments.run_config import RunConfig
from slime_like.checkpoints.lock import FolderInUse, FolderLock
from slime_like.engines.registry import engine_traits
from slime_like.origin_check import OriginCheck
from slime_like.tinker import codec
from slime_like.tinker.access import KeyRing
from slime_like.tinker.app import make_app
from slime_like.tinker.base_model import NO_UNMERGED, NO_WHOLE, BaseModel
from slime_like.tinker.data import DataLimits
from slime_like.tinker.errors import Failed
from slime_like.tinker.fingerprint import fingerprint_of
from slime_like.tinker.futures import Request
from slime_like.tinker.middleware import Gate, PatientProtocol
from slime_like.tinker.model_registry import ModelRegistry
from slime_like.tinker.operations import ServerOperations
from slime_like.tinker.request_queue import Dispatcher
from slime_like.tinker.service import Service, make_folders
from slime_like.tinker.store import Journal, JournalError
from slime_like.tinker.supervision import supervised
from slime_like.tinker.worker_rpc import WorkerLink

log = logging.getLogger("slime_like.tinker")
API_FOLDER = "api"  # subfolder that the API process locks; the workers lock the folder itself
JOURNAL_FILE = "journal.sqlite"
LOG_FILE = "server.log"
LOG_BYTES = 50_000_000
LOG_FILES = 5
HOUSEKEEPING_S = 5.0
OLD_API_S = 30.0  # seconds for a replaced API process to exit
LOCAL_BATCH = 64  # sampling requests per command to local engines
# what samplers cannot serve
TIED_UNEMBED = (
    "with --rollout-engine sglang for a model with tied embeddings: SGLang cannot load an untied "
    "output layer into it; set train_unembed=False, or serve with --rollout-engine local"
)
WITHOUT_MLP = "set train_mlp=False, or serve with --lora-sync merged"
EXPERTS = (
    "with --lora-sync adapter for a mixture of experts, to which engines apply no adapters: "
    f"{WITHOUT_MLP}"
)
DEFAULT_CONTEXT = 2**17  # for models without a context length in their config


def key_ring(path: str | None) -> KeyRing | None:
    return None if path is None else KeyRing(path, valid_keys)


def base_model_of(config: RunConfig) -> BaseModel:
    folder = config.model.hf_checkpoint
    assert folder is not None, "checked on the command line"
    model_config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    architecture = (model_config.get("architectures") or ["unknown"])[0]
    name = config.server.served_model_name or folder
    model = read_hf_model(folder)
    served = engine_traits(config.rollout.rollout_engine).has_servers
    unmerged = config.lora.lora_sync == "adapter"
    unserved = {}
    if served and not unmerged and not config.gpt.untie_embeddings_and_output_weights:
        unserved["train_unembed"] = TIED_UNEMBED
    gpus = config.sglang.rollout_num_gpus_per_engine
    if unmerged and model.transformer.get("num_moe_experts"):
        unserved["train_mlp"] = EXPERTS
    elif unmerged and served and (why := padded_mlp(model, gpus, cuda=cuda_available())):
        unserved["train_mlp"] = f"with --lora-sync adapter, since {why}: {WITHOUT_MLP}"
    return BaseModel(
        folder,
        name,
        architecture,
        unserved,
        max_rank=config.server.max_adapter_rank if unmerged and served else None,
        no_unmerged=NO_UNMERGED if served and not unmerged else "",
        no_whole=NO_WHOLE if served and unmerged else "",
        without_attention=without_attention(model.transformer),
    )


def limits_of(config: RunConfig) -> DataLimits:
    context = config.gpt.max_position_embeddings or DEFAULT_CONTEXT
    assert config.gpt.vocab_size is not None
    max_length = config.server.max_sequence_length or context
    images = None
    if config.server.serve_images:
        from slime_like.data.factory import run_image_processor, run_tokenizer

        images = run_image_processor(config, run_tokenizer(config))
    return DataLimits(config.gpt.vocab_size, max_length, config.server.max_request_tokens, images)


def make_service(
    config: RunConfig,
    journal: Journal,
    call: Callable[[str, codec.Message], Awaitable[object]],
    has_workers: Callable[[], bool] = lambda: True,
) -> Service:
    """Build the service.

    Args:
        call: Executes a command on the workers.
        has_workers: Whether workers are connected.
    """
    root = Path(config.server.server_dir).resolve()
    make_folders(root)
    base = base_model_of(config)
    registry = ModelRegistry(journal)
    operations = ServerOperations(
        registry,
        call,
        folder=root,
        base=base.folder,
        max_snapshots=config.server.max_snapshots,
        exports_adapters=config.lora.lora_sync == "adapter",
        max_adapters=config.server.max_sampler_adapters,
    )
    batch = config.sglang.sglang_server_concurrency
    if not engine_traits(config.rollout.rollout_engine).has_servers:
        batch = config.rollout.rollout_local_batch_size or LOCAL_BATCH
    dispatcher = Dispatcher(
        journal,
        operations,
        max_waiting=config.server.max_queued_requests,
        gap_s=config.server.seq_gap_s,
        batch=batch,
        has_workers=has_workers,
    )
    return Service(config.server, base, limits_of(config), registry, dispatcher, operations)


class ApiProcess:
    """Owner of everything that lives as long as the process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        root = Path(config.server.server_dir).resolve()
        make_folders(root)
        self.lock = take_over(root / API_FOLDER)
        write_log(root / LOG_FILE)  # two processes must not rotate the same file
        self.journal = Journal(root / JOURNAL_FILE)
        self.link = WorkerLink(
            root,
            fingerprint=fingerprint_of(config),
            on_connect=self._workers_connected,
            on_loss=self._workers_ended,
            on_other_settings=self._replaced,
            on_fault=self._failed,
        )
        self.service = make_service(
            config, self.journal, self.link.call, lambda: self.link.connected
        )
        self.service.problem = self._problem
        self.fault: str | None = None
        self._ended = asyncio.Event()
        self._restart_timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[object]] = []

    async def serve(self) -> int:
        """Run until the workers say goodbye, do not come back, or a signal arrives. Returns the
        exit status."""
        server_config = self.config.server
        listening = await listen(server_config.host, server_config.port)
        await self.link.start()
        self.service.dispatcher.restore(self._interruption)
        self.service.dispatcher.start(self._failed)
        keys = key_ring(server_config.api_key_file)
        if keys is not None:
            self.service.sessions.keys = lambda: len(keys)
        gate = Gate(
            make_app(self.service),
            keys=keys,
            max_body=int(server_config.max_body_mb * 1e6),
            origin_check=OriginCheck(
                server_config.host,
                server_config.allowed_hosts or (),
                remedy="; add it to --allowed-hosts",
            ),
            operators=key_ring(server_config.operator_key_file),
        )
        server = make_server(gate)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        self._tasks = [supervised("housekeeping", self._housekeeping(), self._failed)]
        self._wait_for_workers()
        serving = asyncio.create_task(server._serve([listening]))
        serving.add_done_callback(lambda _: self._ended.set())
        await self._ended.wait()
        server.should_exit = True
        await serving
        for task in self._tasks:
            task.cancel()
        await self.service.dispatcher.stop()
        await self.link.stop()
        self.journal.close()
        self.lock.release()
        if self.fault is not None:
            raise Failed(f"{self.fault}; the workers will restart the API process")
        return 0 if self.link.said_goodbye else 1

    def _interruption(self, request: Request) -> str | None:
        """Why a request of an earlier process cannot be executed any more, or None."""
        model = self.service.registry.models.get(request.body.get("model", ""))
        return model.reason if model is not None and model.state == "ended" else None

    def _problem(self) -> str | None:
        """Reason why requests are not executed at the moment; None if they are."""
        if self.fault is not None or self.journal.problem is not None:
            return self.fault or self.journal.problem
        return None if self.link.connected else "there are no workers"

    def _failed(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._ended.set()

    def _replaced(self) -> None:
        log.warning("workers with another command line connected; this API process exits")
        self._ended.set()

    def _workers_connected(self, hello: codec.Message) -> None:
        if self._restart_timer is not None:
            self._restart_timer.cancel()
            self._restart_timer = None
        self.service.sessions.workers_connected(hello)
        self.service.dispatcher.wake()
        url = f"http://{self.config.server.host}:{self.config.server.port}"
        print(f"slime_like.tinker: {hello['facts']['layout']}, {url}", flush=True)

    def _workers_ended(self, reason: str) -> None:
        self.service.sessions.workers_ended(reason)
        if self.link.said_goodbye:
            self._ended.set()
            return
        log.warning(
            "the workers have ended; waiting %g s for new ones (--worker-restart-s)",
            self.config.server.worker_restart_s,
        )
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """End the process if no workers connect within --worker-restart-s."""
        loop = asyncio.get_running_loop()
        delay = self.config.server.worker_restart_s
        self._restart_timer = loop.call_later(delay, self._ended.set)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                self.service.sessions.end_silent_sessions()
            except Exception:
                log.exception("housekeeping")


def take_over(folder: Path) -> FolderLock:
    """Lock the folder of an API process, waiting for its predecessor to exit. Raises
    FolderInUse."""
    lock = FolderLock(folder, "--server-dir")
    deadline = time.monotonic() + OLD_API_S
    while True:
        try:
            lock.acquire()
            return lock
        except FolderInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def make_server(app: Gate) -> uvicorn.Server:
    """The HTTP server, without signal handlers, which would end it before the journal is closed."""
    settings = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(settings)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server


class ServerLog(RotatingFileHandler):
    """Log file of the server. On a full disk the server continues, with a single warning."""

    warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.warned:
            self.warned = True
            print(
                f"warning: --server-dir: {self.baseFilename} cannot be written: {error.strerror}; "
                "requests are served but not logged until there is space",
                file=sys.stderr,
                flush=True,
            )


def write_log(path: Path) -> None:
    """Log each request, session and model to a rotating file; only warnings reach the terminal."""
    for shown in logging.getLogger().handlers:
        shown.setLevel(logging.WARNING)
    handler = ServerLog(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


async def listen(host: str, port: int) -> socket.socket:
    """Listen on the address. Retries for a few seconds, since an exiting API process may still use
    it. Raises Failed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in range(20):
        # with an explicit protocol number asyncio recognises TCP and sets TCP_NODELAY, which saves
        # 40 ms per response
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            if attempt == 19:
                raise Failed(f"--host {host} --port {port}: {error.strerror}") from error
            await asyncio.sleep(0.25)
        else:
            return listening
    raise AssertionError("unreachable")


def main() -> int:
    """Run the API process. argv: the world size, then the server's command line."""
    logging.basicConfig(level=logging.WARNING, format="slime_like.tinker: %(message)s")
    world_size = int(sys.argv[1])
    argv = sys.argv[2:]
    config = parse_or_exit(argv, world_size, 0, SERVER)

    async def serve() -> int:
        return await ApiProcess(config).serve()

    try:
        return asyncio.run(serve())
    except (Failed, FolderInUse, JournalError, OSError) as error:  # OSError: e.g. a full disk
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
