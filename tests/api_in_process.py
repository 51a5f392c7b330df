"""The Tinker API in the test process, over ASGI. A function replaces the workers and returns
numbers of the right shapes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from arguments.schema import ServerConfig
from slime_like.origin_check import OriginCheck
from slime_like.tinker.access import KeyRing
from slime_like.tinker.app import make_app
from slime_like.tinker.base_model import BaseModel
from slime_like.tinker.data import DataLimits
from slime_like.tinker.errors import Refused
from slime_like.tinker.middleware import Gate
from slime_like.tinker.model_registry import ModelRegistry
from slime_like.tinker.operations import ServerOperations
from slime_like.tinker.request_queue import Dispatcher
from slime_like.tinker.service import Service, make_folders
from slime_like.tinker.store import Journal


async def workers(id: str, command: dict[str, Any]) -> Any:
    """What the workers would answer, without a model."""
    if command["op"] == "forward_backward":
        rows = sum(command["lengths"])
        columns = len(command["fields"].get("label_sets", b"")) // (8 * rows) or 1
        return {
            "scores": np.zeros(rows * columns, "<f4").tobytes(),
            "losses": np.zeros(rows, "<f4").tobytes(),
            "metrics": {},
        }
    if command["op"] == "optim_step":
        if command["missing"]:
            raise Refused(f"optim_step rejected: {command['missing']}")
        return {"stepped": True, "grad_norm": 1.0}
    if command["op"] in ("save", "export", "export_adapter"):
        Path(command["folder"]).mkdir(parents=True)
        (Path(command["folder"]) / "model.safetensors").write_bytes(b"weights")
    if command["op"] == "sample":
        one = {"tokens": b"\0" * 4, "log_probs": b"\0" * 4, "stopped": True}
        return [{"sequences": [one] * n, "prompt_log_probs": None} for n in command["counts"]]
    return None


class Api:
    """The API without processes: requests in, answers out, one event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: KeyRing | None = None,
        operators: KeyRing | None = None,
        max_adapters: int | None = None,
    ) -> None:
        """max_adapters: of a batch of samples; samplers then get adapters, not merged weights."""
        self.loop = asyncio.new_event_loop()
        make_folders(folder)
        journal, config = Journal(":memory:"), ServerConfig(future_hold_s=5.0, seq_gap_s=1.0)
        registry = ModelRegistry(journal)
        operations = ServerOperations(
            registry,
            workers,
            folder=folder,
            base="/m",
            max_snapshots=8,
            exports_adapters=max_adapters is not None,
            max_adapters=max_adapters or 1,
        )
        self.dispatcher = Dispatcher(journal, operations, max_waiting=4096, gap_s=1.0, batch=4)
        base, limits = BaseModel("/m", "m", "Arch"), DataLimits(100, 32, 4096)
        service = Service(config, base, limits, registry, self.dispatcher, operations)
        self.faults: list[str] = []
        gate = Gate(
            make_app(service),
            keys=keys,
            max_body=10**6,
            origin_check=OriginCheck(config.host),
            operators=operators,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(gate), base_url="http://127.0.0.1/api/v1/"
        )
        self.loop.run_until_complete(self._start())
        self.service = service
        self.seq = 0

    async def _start(self) -> None:
        self.dispatcher.start(self.faults.append)

    def open(self, sdk_version: str = "") -> None:
        """A session with two models."""
        body = {"sdk_version": sdk_version}
        self.session = str(self.post("create_session", body)["session_id"])
        self.model, self.bystander = (self.create(n) for n in range(2))

    def create(self, number: int, rank: int = 0) -> str:
        lora = {"rank": rank}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "m"}
        future = self.post("create_model", {**body, "lora_config": lora})
        return str(self.post("retrieve_future", future)["model_id"])

    def send(self, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
        return self.loop.run_until_complete(self.http.post(path, content=content, headers=headers))

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.loop.run_until_complete(self.http.get(path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> Any:
        answer = self.send(path, json.dumps(body).encode(), headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def still_executes(self) -> None:
        """A step of the bystander is executed."""
        self.seq += 1
        body = {"model_id": self.bystander, "seq_id": self.seq, "adam_params": {}}
        assert "metrics" in self.post("retrieve_future", self.post("optim_step", body))
        assert self.faults == []

    def close(self) -> None:
        self.loop.run_until_complete(self.dispatcher.stop())
        self.loop.run_until_complete(self.http.aclose())
        self.loop.close()
