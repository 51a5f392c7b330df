"""Hostile and malformed requests: every one gets a 4xx or a named failure, none a 5xx or a hang;
memory stays, and so does the state."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tests.e2e.api_server import ApiServer, batch, datum, policy
from tests.e2e.test_server_order import PROTOBUF, Raw

pytestmark = pytest.mark.extended

REQUESTS = 300
PATHS = (
    "client/config", "client/dynamic_config", "create_session", "session_heartbeat", "create_model", "get_info", "forward_backward", "optim_step",
    "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "create_sampling_session", "join_sampling_session",
    "create_custom_loss",
    "asample", "retrieve_future", "weights_info", "sessions/x/finish",
)  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "create_model": {"session_id": "S", "model_seq_id": 50, "base_model": "x", "lora_config": {"rank": 0}},
    "optim_step": {"model_id": "M", "seq_id": 1, "adam_params": {"learning_rate": 0.1, "eps": 1e-8}},
    "save_weights": {"model_id": "M", "seq_id": 1, "path": "a", "overwrite": False, "ttl_seconds": 3600},
    "save_weights_for_sampler": {"model_id": "M", "seq_id": 1, "path": "a", "kind": "snapshot"},
    "load_weights": {"session_id": "S", "model_seq_id": 60, "path": "tinker://a/weights/b", "optimizer": True},
    "create_sampling_session": {"session_id": "S", "sampling_session_seq_id": 1, "base_model": "x"},
    "asample": {"sampling_session_id": "S:sample:0", "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 2, "stop": None},
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}},
    "create_custom_loss": {"session_id": "S", "custom_loss_seq_id": 3, "name": "l", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "call_function", "name": "x", "target": "torch.exp", "args": [{"ref": "logprobs"}], "kwargs": {"out": None}},
        {"op": "call_method", "name": "y", "target": "sum", "args": [{"ref": "x"}, {"tuple": [0, {"slice": [0, {"float": "inf"}, 1]}]}], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "y"}, {"dict": {"custom/a:sum": {"ref": "y"}}}]}], "kwargs": {}}]}},
    "retrieve_future": {"request_id": "M/1", "allow_metadata_only": False},
    "get_info": {"model_id": "M"},
    "session_heartbeat": {"session_id": "S"},
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 5000, "\ud800", "\0", "../../etc/passwd", [], [[]] * 50, {}, {"$bytes": 0},
    {"a": {"a": {"a": 1}}}, ["a", 1, None], "tinker://", "NaN",
)  # fmt: skip


def mutated(rng: random.Random, value: Any) -> Any:
    """Some place of it is something odd, gone, or there besides."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed = dict(value)
        key = rng.choice(list(changed))
        kind = rng.random()
        if kind < 0.15:
            del changed[key]
        elif kind < 0.25:
            changed[rng.choice(["extra", "model_id", "__proto__", "x" * 300])] = rng.choice(ODD)
        else:
            changed[key] = mutated(rng, changed[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.5:
        return [mutated(rng, value[0]), *value[1:]]
    return rng.choice(ODD)


def bytes_of(rng: random.Random, raw: Raw, model: str) -> tuple[str, bytes, dict[str, str]]:
    """(path, body, headers) of one hostile request."""
    kind = rng.random()
    if kind < 0.35:  # protobuf that is bent
        body = bytearray(
            raw.pass_body(
                model,
                rng.randrange(1, 2**31 - 1),
                [datum(4, rng.randrange(99), weights=[1, 1, 1, 1])],
            )
        )
        if rng.random() < 0.5:
            for _ in range(rng.randrange(1, 6)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        else:
            request = pb.ForwardBackwardRequest.FromString(bytes(body))
            tensor = request.data[0].loss_fn_inputs[
                rng.choice(["target_tokens", "weights", "", "logprobs", "\u00e9"])
            ]
            tensor.dtype = rng.randrange(0, 6)
            tensor.dense = rng.randbytes(rng.choice([0, 1, 3, 16, 4000]))
            tensor.shape.extend(rng.choice([[], [-1], [2**62], [0], [4, 4]]))
            request.loss_fn = rng.choice(["cross_entropy", "", "ppo", "\0", "x" * 9999])
            body = bytearray(request.SerializeToString())
        return "forward_backward", bytes(body), PROTOBUF
    path = rng.choice(PATHS)
    if kind < 0.5:  # no JSON at all
        return (
            path,
            rng.choice(
                [
                    b"",
                    b"{",
                    b"\xff\xfe\x00",
                    b"[" * 100_000,
                    b"9" * 10_000,
                    b'"\\ud800"',
                    b"null",
                    rng.randbytes(200),
                ]
            ),
            {},
        )
    body = mutated(rng, BODIES.get(path, {"session_id": "S"}))
    text = json.dumps(body)
    session = raw.session
    return (
        path,
        text.replace('"M', f'"{model}').replace('"S', f'"{session}').encode(),
        {"Content-Type": "application/json"},
    )


def memory(api: ApiServer) -> int:
    """Bytes of the API process and of the worker."""
    return int(sum(psutil.Process(pid).memory_info().rss for pid in (api.api_pid, api.process.pid)))


def test_fuzzed_requests_do_no_harm(api: ApiServer) -> None:
    """A model of its own is the target of all; one next to it trains on as if nothing was."""
    raw, rng = Raw(api), random.Random(7)
    model, bystander = raw.create(0), policy(api.client(), api)
    first = bystander.forward(batch(2), "cross_entropy").result().metrics["loss:sum"]
    seen: dict[int, int] = {}
    before = 0
    for number in range(REQUESTS):
        if number == REQUESTS // 3:
            before = memory(api)  # after what a first request of each kind loads
        path, body, headers = bytes_of(rng, raw, model)
        answer = raw.http.post(path, content=body, headers=headers)
        assert answer.status_code < 500, (path, body[:300], answer.status_code, answer.text)
        assert answer.status_code not in (408, 409, 429), "which clients repeat"
        if answer.status_code >= 400:
            assert answer.json()["detail"], (path, answer.text)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
    assert seen.keys() >= {200, 400, 404, 422}, seen
    assert memory(api) - before < 40e6, "growth"
    assert bystander.forward(batch(2), "cross_entropy").result().metrics["loss:sum"] == first
    assert "Traceback" not in api.log(), api.log()[-3000:]


def test_unknown_routes_and_methods(api: ApiServer) -> None:
    http = api.http()
    assert http.get("nothing").status_code == 404
    assert http.get("create_model").status_code == 405
    assert http.request(
        "DELETE", "training_runs/x/checkpoints/../../../etc/passwd"
    ).status_code in (404, 405)
    assert http.get("training_runs?limit=-1").status_code == 422
    assert http.get("checkpoints?offset=abc").status_code == 422


def test_a_large_body_is_refused_before_it_is_read(api: ApiServer) -> None:
    """By its announced length, and where none is announced once it is too long. --max-body-mb is 8
    here."""
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as opened:
        opened.sendall(
            b"POST /api/v1/optim_step HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-x\r\nContent-Length: 1000000000\r\n\r\n"
        )
        assert b" 413 " in opened.recv(200)

    def endless() -> Any:
        for _ in range(40):
            yield b"x" * 500_000

    with contextlib.suppress(httpx.TransportError):  # closed while we were still sending
        assert api.http().post("optim_step", content=endless()).status_code == 413


def test_packed_bodies(api: ApiServer) -> None:
    """zstd, as the SDK packs them on request: what is in it counts, and how large that is."""

    def post(content: bytes, encoding: str = "zstd") -> int:
        return int(
            api.http()
            .post("create_session", content=content, headers={"Content-Encoding": encoding})
            .status_code
        )

    pack = zstandard.ZstdCompressor().compress
    assert post(pack(b"{}")) == 200
    assert (
        post(pack(b"no json")) == 400
        and post(b"{}") == 400
        and post(pack(b"{}")[:-3]) == 400
        and post(b"") == 400
    )
    bomb = pack(b" " * 200_000_000)
    assert len(bomb) < 100_000 and post(bomb) == 413
    assert post(b"{}", "gzip") == 415
    assert api.http().post("client/config", json={}).json()["proto_compress_fwdbwd"] is False, (
        "on loopback it would only cost time"
    )


def test_keys(work: Any, tmp_path: Path) -> None:
    """With --api-key-file: 401 without a key or with another, and what one key has is not there for
    the other."""
    (tmp_path / "keys").write_text("tml-first-key-000\ntml-second-key-00\n")
    with ApiServer(
        work.model, tmp_path / "api", "--api-key-file", str(tmp_path / "keys")
    ) as guarded:
        assert guarded.http("tml-wrong").post("create_session", json={}).status_code == 401
        assert httpx.post(f"{guarded.url}/api/v1/create_session", json={}).status_code == 401
        first, second = guarded.http("tml-first-key-000"), guarded.http("tml-second-key-00")
        session = first.post("create_session", json={}).json()["session_id"]
        assert first.post("session_heartbeat", json={"session_id": session}).status_code == 200
        assert second.post("session_heartbeat", json={"session_id": session}).status_code == 404
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(work.model)}
        future = first.post("create_model", json=body).json()
        model = first.post("retrieve_future", json=future).json()["model_id"]
        for path, asked in (
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
            ("retrieve_future", future),
        ):
            assert second.post(path, json=asked).status_code == 404
        assert (guarded.folder / "server").stat().st_mode & 0o077 == 0, (
            "the server's folder is the user's alone"
        )
        assert "tml-" not in (guarded.folder / "server" / "journal.sqlite").read_bytes().decode(
            "latin1"
        )


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_closed(api: ApiServer) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as opened:
        opened.sendall(b"POST /api/v1/optim_step HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        started = time.monotonic()
        assert opened.recv(1) == b"" and time.monotonic() - started < 40


def test_it_listens_on_loopback_alone(api: ApiServer) -> None:
    addresses = {
        c.laddr.ip for c in psutil.Process(api.api_pid).net_connections() if c.status == "LISTEN"
    }
    assert addresses == {"127.0.0.1"} and re.match(r"http://127\.0\.0\.1:", api.url)
