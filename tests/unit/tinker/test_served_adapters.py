"""Which adapters SGLang servers hold for sampling sessions, and what is left of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.servers.http import RequestFailed
from slime_like.sglang.api import SglangApi
from slime_like.tinker import sglang_adapters
from slime_like.tinker.sglang_adapters import ServedAdapters


class Server(SimpleNamespace):
    __hash__ = object.__hash__


class OneServer:
    """A pool of one server, which is a set of names."""

    api = SglangApi()
    health = SimpleNamespace(timeout_s=1.0)

    def __init__(self) -> None:
        self.worker = Server(evictions=0, alive=True, url="http://server")
        self.loaded: set[str] = set()
        self.versions: list[object] = []
        self.answers = True  # else what it is asked is done, and its answer is lost

    def ready(self) -> list[Any]:
        return [self.worker]

    alive = ready

    def evict(self, worker: Any, reason: str) -> None:
        worker.evictions += 1

    def post(self, worker: Any, call: Any, *, timeout_s: float) -> dict[str, object]:
        name = call.body.get("lora_name", "")
        if call.path == "/load_lora_adapter":
            if name in self.loaded:
                raise RequestFailed("status_400", f"{name} is already loaded", retryable=False)
            self.loaded.add(name)
        elif call.path == "/unload_lora_adapter":
            if name not in self.loaded:
                message = f"LoRA with name {name} does not exist"
                raise RequestFailed("status_400", message, retryable=False)
            self.loaded.discard(name)
        else:
            self.versions.append(call.body["new_version"])
        if not self.answers:
            raise RequestFailed("timeout", "no answer", retryable=True)
        return {}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> OneServer:
    monkeypatch.setattr(sglang_adapters, "weights_digest", lambda base: "digest")
    monkeypatch.setattr(sglang_adapters, "read_adapter", lambda folder, digest: None)
    return OneServer()


def adapters_on(server: Any, max_adapters: int) -> ServedAdapters:
    return ServedAdapters(server, "/base", max_adapters=max_adapters, timeout_s=1.0, others=True)


def test_after_a_failed_sample_servers_of_others_are_left_as_they_were(server: OneServer) -> None:
    adapters = adapters_on(server, 4)
    adapters.hold(["/a"])
    adapters.hold(["/b"])
    adapters.forget()
    adapters.hold(["/b"])
    assert len(server.loaded) == 2
    adapters.close()
    assert server.loaded == set() and server.versions == ["default"]


def test_after_failed_samples_the_limit_holds(
    server: OneServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the server came back without what it had."""
    adapters = adapters_on(server, 1)
    for number in range(5):
        adapters.hold([f"/{number}"])
        adapters.forget()
        assert len(server.loaded) == 1
    server.loaded.clear()
    adapters.hold(["/other"])
    adapters.close()
    assert server.loaded == set() and caplog.messages == []


def test_an_adapter_whose_answer_was_lost_is_unloaded_too(server: OneServer) -> None:
    adapters = adapters_on(server, 4)
    server.answers = False
    adapters.hold(["/a"])
    assert server.worker.evictions == 1 and len(server.loaded) == 1
    server.answers = True
    adapters.close()
    assert server.loaded == set()


def test_an_adapter_that_stays_is_said_and_tried_again(
    server: OneServer, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = adapters_on(server, 1)
    adapters.hold(["/a"])
    fail = RequestFailed("timeout", "no answer", retryable=True)
    post, server.post = server.post, raising(fail)  # type: ignore[method-assign]
    adapters._unload(next(iter(server.loaded)))
    assert "an adapter stays on the engine http://server: no answer" in caplog.text
    server.post = post  # type: ignore[method-assign]
    adapters.close()
    assert server.loaded == set()


def raising(error: Exception) -> Any:
    def post(*args: Any, **named: Any) -> None:
        raise error

    return post
