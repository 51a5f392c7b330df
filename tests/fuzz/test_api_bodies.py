"""Bodies of the Tinker API: whatever they hold, answers are 2xx or 4xx, and execution goes on.

The API runs in this process, over ASGI; in place of the workers a function answers with numbers of
the right shapes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from arguments.schema import ServerConfig
from slime_like.tinker.access import Visitors
from slime_like.tinker.app import make_app
from slime_like.tinker.base_model import BaseModel
from slime_like.tinker.data import Limits
from slime_like.tinker.middleware import Gate
from slime_like.tinker.model_registry import Registry
from slime_like.tinker.operations import ServerOperations
from slime_like.tinker.request_queue import Dispatcher
from slime_like.tinker.service import Service, make_folders
from slime_like.tinker.store import Journal
from tests.e2e.api_server import datum
from tests.e2e.test_server_hostile import BODIES, PATHS, bytes_of
from tests.e2e.test_server_order import PROTOBUF, Raw

Sent = tuple[str, bytes, dict[str, str]]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


async def workers(id: str, command: dict[str, Any]) -> Any:
    """What the workers would answer, without a model."""
    if command["op"] == "pass":
        rows = sum(command["lengths"])
        columns = len(command["fields"].get("label_sets", b"")) // (8 * rows) or 1
        return {
            "scores": np.zeros(rows * columns, "<f4").tobytes(),
            "losses": np.zeros(rows, "<f4").tobytes(),
            "metrics": {},
        }
    if command["op"] == "step":
        return {"stepped": True, "grad_norm": 1.0}
    if command["op"] == "sample":
        one = {"tokens": b"\0" * 4, "log_probs": b"\0" * 4, "stopped": True}
        return [{"sequences": [one] * n, "prompt_log_probs": None} for n in command["counts"]]
    return None


class Api:
    """The API without processes: requests in, answers out, one event loop."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        make_folders(folder)
        journal, config = Journal(":memory:"), ServerConfig(future_hold_s=5.0, seq_gap_s=1.0)
        registry = Registry(journal)
        operations = ServerOperations(registry, workers, folder=folder, base="/m", max_snapshots=4)
        self.dispatcher = Dispatcher(journal, operations, most_waiting=4096, gap_s=1.0, batch=4)
        base, limits = BaseModel("/m", "m", "Arch", True), Limits(100, 32, 4096)
        service = Service(config, base, limits, registry, self.dispatcher, operations)
        self.faults: list[str] = []
        gate = Gate(make_app(service), keys=None, max_body=10**6, visitors=Visitors(config.host))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(gate), base_url="http://127.0.0.1/api/v1/"
        )
        self.loop.run_until_complete(self._start())
        self.session = str(self.post("create_session", {})["session_id"])
        self.model, self.bystander = (self._create(n) for n in range(2))
        self.seq = 0

    async def _start(self) -> None:
        self.dispatcher.start(self.faults.append)

    def _create(self, number: int) -> str:
        lora = {"rank": 0}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "m"}
        future = self.post("create_model", {**body, "lora_config": lora})
        return str(self.post("retrieve_future", future)["model_id"])

    def send(self, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
        return self.loop.run_until_complete(self.http.post(path, content=content, headers=headers))

    def post(self, path: str, body: Any) -> Any:
        answer = self.send(path, json.dumps(body).encode(), {})
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

    pass_body = Raw.pass_body


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("api"))
    yield made
    made.close()


@st.composite
def json_bodies(draw: st.DrawFn) -> tuple[str, str]:
    """A path and a body in which one place is something else."""
    path = draw(st.sampled_from(PATHS))
    body = copy.deepcopy(BODIES.get(path, {"session_id": "S"}))
    at: Any = body
    while True:
        key = draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.just(0))
        inner = at[key] if isinstance(at, dict) or at else None
        if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
            break
        at = inner
    if draw(st.booleans()) and isinstance(at, dict):
        at[draw(st.text(max_size=8))] = draw(JSON)
    else:
        at[key] = draw(JSON)
    return path, json.dumps(body)


@st.composite
def pass_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors, loss and settings of a forward_backward."""
    numbers = st.floats(width=32) | st.sampled_from([0.0, 1.0])
    length = draw(st.integers(1, 5))
    names = st.sampled_from(["weights", "logprobs", "advantages", "mask", "values", "returns"])
    tensors = draw(st.dictionaries(names, st.lists(numbers, min_size=length, max_size=length)))
    losses = ["cross_entropy", "ppo", "cispo", "dro", "gspo", "ppo_critic", "sapo", "gmpo", "dppo"]
    keys = ["clip_high_threshold", "beta", "value_clip", "sapo_tau_pos", "entropy_coef", "eps_clip"]
    config = draw(st.dictionaries(st.sampled_from(keys), st.floats(), max_size=2))
    return {
        "length": length,
        "tensors": tensors,
        "loss": draw(st.sampled_from(losses)),
        "config": config,
    }


def harmless(api: Api, path: str, content: bytes, headers: dict[str, str]) -> None:
    """The answer is no fault of the server's, and neither is the result."""
    answer = api.send(path, content, headers)
    assert 200 <= answer.status_code < 500, (path, content, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["detail"]
    api.still_executes()


@given(given=json_bodies())
def test_json(api: Api, given: tuple[str, str]) -> None:
    path, text = given
    text = text.replace('"M', f'"{api.model}').replace('"S', f'"{api.session}')
    harmless(api, path, text.encode(), {"Content-Type": "application/json"})


@given(content=st.binary(max_size=200), path=st.sampled_from(PATHS))
def test_bytes(api: Api, path: str, content: bytes) -> None:
    harmless(api, path, content, {})


@given(seed=st.integers(0, 2**32))
def test_bent_protobuf(api: Api, seed: int) -> None:
    path, content, headers = bytes_of(random.Random(seed), api, api.model)  # type: ignore[arg-type]  # session and pass_body are all it needs
    harmless(api, path, content, headers)


@given(given=pass_bodies(), number=st.integers(1, 2**20))
def test_passes(api: Api, given: dict[str, Any], number: int) -> None:
    """Results that are there are results, or failures of the client's."""
    rows: list[types.Datum] = [datum(given["length"], number, **given["tensors"])]
    api.seq += 1
    body = api.pass_body(api.bystander, api.seq, rows, given["loss"], **given["config"])  # type: ignore[misc, arg-type]
    answer = api.send("forward_backward", body, PROTOBUF)
    assert answer.status_code == 200, answer.text
    result = api.send("retrieve_future", answer.content, PROTOBUF)
    assert result.status_code == 200
    if result.headers["content-type"] == "application/json":
        assert result.json()["category"] == "user", result.text
