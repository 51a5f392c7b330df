"""The API server as a user starts it, for tests, and batches for it.

with ApiServer(model, folder) as server: client = server.client()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tinker
from tinker import types

from tests.e2e.programs import ENVIRONMENT, ROOT, clean_environment, free_port

KEY = "tml-key-of-the-tests"


class ApiServer:
    """ranks above 1: under torchrun. environment: variables instead of `ENVIRONMENT`."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        ranks: int = 1,
        program: Sequence[str] = ("-m", "slime_like.tinker"),
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        self.environment = environment
        self.model, self.folder, self.flags, self.ranks = model, folder, flags, ranks
        self.program = program
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._clients: list[tinker.ServiceClient] = []

    def __enter__(self) -> ApiServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start()
        except BaseException:  # nobody else would end what came up too late
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        launcher = (
            [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={self.ranks}",
                f"--master-port={free_port()}",
            ]
            if self.ranks > 1
            else []
        )
        command = [
            sys.executable, *launcher, *self.program, "--hf-checkpoint", str(self.model), "--port", str(self.port),
            "--server-dir", str(self.folder / "server"), *self.flags,
        ]  # fmt: skip
        log = open(self.folder / "log.txt", "a")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**clean_environment(), **self.environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.wait_until_up()

    def wait_until_up(self, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(self.log())

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    @property
    def api_pid(self) -> int:
        import json

        return int(json.loads((self.folder / "server" / "link.json").read_text())["pid"])

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        """The SDK's."""
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._clients[-1]

    def http(self, key: str = KEY) -> httpx.Client:
        """For what the SDK would not send."""
        return httpx.Client(base_url=f"{self.url}/api/v1/", headers={"X-API-Key": key}, timeout=60)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=120)

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            with contextlib.suppress(Exception):
                client.close("success").result(timeout=100)
        ranks = (
            psutil.Process(self.process.pid).children(recursive=True)
            if self.process.poll() is None
            else []
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=120)
        for process in (
            ranks
        ):  # torchrun gives them sessions of their own; rank 0 would start another API process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.api_pid, signal.SIGKILL)


def policy(
    client: tinker.ServiceClient, server: ApiServer, *, rank: int = 0, **settings: Any
) -> tinker.TrainingClient:
    """A new model of all weights, or an adapter of this rank."""
    return client.create_lora_training_client(str(server.model), rank=rank, **settings).result()


def critic(
    client: tinker.ServiceClient, server: ApiServer, *, rank: int = 0
) -> tinker.TrainingClient:
    return policy(client, server, rank=rank, user_metadata={"model_role": "critic"})


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 90, length)]


def datum(
    length: int, seed: int, *, targets: Sequence[int] | None = None, **inputs: Any
) -> types.Datum:
    """Random tokens, each scored on the next, and arrays next to them."""
    row = tokens(length + 1, seed)
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    wanted = np.asarray(row[1:] if targets is None else targets, dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={"target_tokens": wanted, **arrays},
    )


def batch(count: int, seed: int = 0) -> list[types.Datum]:
    """For cross_entropy, with weights of both signs, of lengths from 4 to 16."""
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(4, 17, count)]
    return [datum(n, 1000 * seed + i, weights=rng.normal(size=n)) for i, n in enumerate(lengths)]


def weights_of(path: Path) -> dict[str, Any]:
    """Of a sampler checkpoint on the server's disk."""
    from safetensors.torch import load_file

    return dict(load_file(path / "model.safetensors"))


def sampler_folder(server: ApiServer, path: str) -> Path:
    """Where the checkpoint tinker://run/sampler_weights/name lies."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (server.folder / "server" / "checkpoints" / run / kind).glob(f"{name}.*")
    return folder
