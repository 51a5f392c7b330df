"""--lora-sync adapter: servers keep the base model and get adapters, under a name for each version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.engines.base import GenerateOutput
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.servers.router import Router
from slime_like.weight_sync.settings import AdapterSettings
from tests.fake_sglang import (
    REQUESTS,
    SAMPLING,
    FakeServer,
    engine_of,
    fake_servers,
    make_served_model,
    weights_of,
)
from tests.real_servers import in_background, wait_until

ADAPTER = AdapterSettings(rank=4, alpha=8.0)
LOADS = {
    "broadcast": "/load_lora_adapter_from_tensors",
    "tensor": "/load_lora_adapter_from_tensors",
    "disk": "/load_lora_adapter",
}
# no call that stops requests or replaces weights
MERGED = ("pause", "continue", "begin", "update_weights_from")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


def factors(model: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Of an adapter of every query and down projection."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights_of(model):
        if name.split(".")[-2] in ("q_proj", "down_proj"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for half, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                yield f"{module}.lora_{half}.weight", torch.randn(shape, generator=generator) * 0.3


def expected(model: str, seed: int) -> list[GenerateOutput]:
    """Of the merged weights."""
    adapter = dict(factors(model, seed))
    weights = dict(weights_of(model))
    for name in weights:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            a, b = (adapter[f"{module}.lora_{half}.weight"] for half in "AB")
            weights[name] = weights[name] + 2.0 * (b @ a)
    engine = LocalEngine(model, None)
    engine.update_weights(iter(weights.items()), 1)
    return engine.generate(REQUESTS, SAMPLING)


def assert_right(outputs: list[GenerateOutput], model: str, version: int) -> None:
    for output, right in zip(outputs, expected(model, version), strict=True):
        assert output.failure is None and output.tokens == right.tokens, output.failure
        assert output.weight_versions == (version,) * len(output.tokens)
        assert output.log_probs == pytest.approx(right.log_probs, abs=1e-5)


def adapters(server: FakeServer) -> list[str]:
    """Versions of the adapters that it has."""
    return [name.rpartition("-")[2] for name in server.adapters]


def paths(server: FakeServer) -> list[str]:
    return [path for path, _ in server.seen]


@pytest.mark.parametrize("transport", LOADS)
def test_every_update_is_an_adapter_and_nothing_else(model: str, transport: str) -> None:
    sampled = set()
    with (
        fake_servers(model, 2) as servers,
        engine_of(model, servers, transport=transport, synced=False, adapter=ADAPTER) as engine,
    ):
        for version in (1, 2, 3):
            engine.pause()
            engine.update_weights(factors(model, version), version)
            engine.resume()
            assert engine.weight_version == version
            outputs = engine.generate(REQUESTS, SAMPLING)
            assert_right(outputs, model, version)
            sampled.add(outputs[0].tokens)
            # an adapter that no request uses is gone as soon as there is a newer one
            assert [adapters(server) for server in servers] == [[str(version)]] * 2
        assert len(sampled) > 1, "the adapters make no difference"
        for server in servers:
            assert server.count(LOADS[transport]) == 3
            assert not [path for path in paths(server) if any(word in path for word in MERGED)]
        folders = {
            Path(body["lora_path"])
            for path, body in servers[0].seen
            if path == "/load_lora_adapter"
        }
        assert sum(folder.exists() for folder in folders) == (transport == "disk")
        sent = sum(tensor.nbytes for _, tensor in factors(model, 1)) / 1e9
        assert engine.take_metrics()["engine/weight_update_gb"] == pytest.approx(sent)
    assert not any(folder.exists() for folder in folders)
    assert not any(server.adapters for server in servers), "servers keep adapters of an ended run"


def test_a_request_keeps_the_adapter_that_it_began_with(model: str) -> None:
    """Its tokens have that version, although the server reports the newer one by then; the adapter
    stays until no request uses it."""

    class Reporting(FakeServer):
        """Reports the version of the time of the answer, as SGLang does."""

        def _paced(self, body: Any, answer: Any) -> Any:
            answer = super()._paced(body, answer)
            for span in answer["meta_info"]["weight_versions"]:
                span["version"] = self.version
            return answer

    with (
        Reporting(model) as server,
        engine_of(model, [server], transport="tensor", synced=False, adapter=ADAPTER) as engine,
    ):
        engine.update_weights(factors(model, 1), 1)
        server.pace_s = lambda body: 0.2
        with in_background(engine, REQUESTS, SAMPLING) as outputs:
            wait_until(lambda: server.count("/generate") == 3, "all requests at the server")
            start = time.monotonic()
            engine.update_weights(factors(model, 2), 2)
            assert time.monotonic() - start < 1.5, "the update waits for requests"
            assert not outputs and adapters(server) == ["1", "2"]
        assert_right(outputs, model, 1)
        server.pace_s = lambda body: 0
        assert_right(engine.generate(REQUESTS, SAMPLING), model, 2)
        engine.update_weights(factors(model, 3), 3)
        assert adapters(server) == ["3"]


@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "out of reach"])
def test_a_server_that_comes_back_gets_the_adapter_before_requests(
    model: str, restarted: bool
) -> None:
    with (
        fake_servers(model, 2) as servers,
        engine_of(
            model,
            servers,
            transport="tensor",
            synced=False,
            adapter=ADAPTER,
            probe_timeout_s=0.5,
        ) as engine,
    ):
        engine.update_weights(factors(model, 1), 1)
        servers[0].hung = True
        wait_until(lambda: len(engine.pool.ready()) == 1, "the server is out")
        if restarted:
            servers[0].adapters.clear()
            servers[0].version = "default"
        servers[0].hung = False
        wait_until(lambda: len(engine.pool.ready()) == 2, "the server is back")
        servers[1].hung = True  # the first one answers all
        assert adapters(servers[0]) == ["1"]
        wait_until(lambda: len(engine.pool.ready()) == 1, "the other server is out")
        assert_right(engine.generate(REQUESTS, SAMPLING), model, 1)
        servers[1].hung = False


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_that_restarts_between_two_probes_gets_the_adapter(model: str, count: int) -> None:
    """No probe has failed: requests find it out, and none is lost."""
    with (
        fake_servers(model, count) as servers,
        engine_of(model, servers, transport="tensor", synced=False, adapter=ADAPTER) as engine,
    ):
        engine.update_weights(factors(model, 1), 1)
        servers[0].adapters.clear()
        servers[0].version = "default"
        assert_right(engine.generate(REQUESTS, SAMPLING), model, 1)
        assert engine.pool is not None and engine.pool.evictions == 1
        wait_until(lambda: len(engine.pool.ready()) == count, "the server is back")
        assert adapters(servers[0]) == ["1"]


def test_a_server_that_was_away_keeps_no_old_adapters(model: str) -> None:
    with (
        fake_servers(model, 2) as servers,
        engine_of(
            model, servers, transport="disk", synced=False, adapter=ADAPTER, probe_timeout_s=0.5
        ) as engine,
    ):
        pool = engine.pool
        assert pool is not None
        engine.update_weights(factors(model, 1), 1)
        servers[0].hung = True
        wait_until(lambda: len(pool.ready()) == 1, "the server is out")
        engine.update_weights(factors(model, 2), 2)
        servers[0].hung = False
        wait_until(lambda: len(pool.ready()) == 2, "the server is back")
        assert [adapters(server) for server in servers] == [["2"]] * 2


def test_an_adapter_that_could_not_be_unloaded_is_tried_again(model: str) -> None:
    with (
        fake_servers(model, 1) as servers,
        engine_of(model, servers, transport="disk", synced=False, adapter=ADAPTER) as engine,
    ):
        (server,) = servers
        engine.update_weights(factors(model, 1), 1)
        server.refused["/unload_lora_adapter"] = 500, "busy"
        engine.update_weights(factors(model, 2), 2)
        assert adapters(server) == ["1", "2"]
        loads = [body for path, body in server.seen if path == "/load_lora_adapter"]
        folders = [Path(body["lora_path"]) for body in loads]
        assert all(folder.exists() for folder in folders), "a server may still read it"
        server.refused.clear()
        engine.update_weights(factors(model, 3), 3)
        assert adapters(server) == ["3"]
        assert not any(folder.exists() for folder in folders)


def test_an_update_that_fails_leaves_nothing(model: str) -> None:
    """The server has loaded the adapter, and then does not say which version it has."""
    with fake_servers(model, 1) as servers:
        (server,) = servers
        with engine_of(model, servers, transport="disk", synced=False, adapter=ADAPTER) as engine:
            server.refused["/update_weight_version"] = 500, "busy"
            with pytest.raises(RunError, match="loading an adapter failed on every engine"):
                engine.update_weights(factors(model, 1), 1)
            assert adapters(server) == ["1"]
        assert not server.adapters


def test_servers_that_do_not_know_a_module_refuse_it(model: str) -> None:
    def renamed() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name.replace("q_proj", "query"), tensor) for name, tensor in factors(model, 1))

    with (
        fake_servers(model, 1) as servers,
        engine_of(model, servers, transport="tensor", synced=False, adapter=ADAPTER) as engine,
        pytest.raises(RunError, match=r"loading an adapter failed on every engine: .*unknown"),
    ):
        engine.update_weights(renamed(), 1)


def test_requests_bypass_a_router(model: str) -> None:
    """It might drop the adapter's name, and servers would answer with the base model."""
    with (
        fake_servers(model, 1) as servers,
        FakeServer(model) as behind,
        engine_of(
            model,
            servers,
            transport="tensor",
            synced=False,
            adapter=ADAPTER,
            router=Router(behind.url, None, 1.0),
        ) as engine,
    ):
        engine.update_weights(factors(model, 1), 1)
        assert_right(engine.generate(REQUESTS, SAMPLING), model, 1)
        assert not behind.count("/generate")
        probes = engine.probe(REQUESTS, SAMPLING)
        assert [url for url, _ in probes] == [servers[0].url]
        assert_right(probes[0][1], model, 1)


def test_an_engine_says_that_it_takes_adapters(model: str) -> None:
    with fake_servers(model, 1) as servers, engine_of(model, servers) as engine:
        assert isinstance(engine, SglangEngine) and not engine.takes_adapter
