"""Workers of tests/dist/test_weight_update.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from benchmarks.parity.steps import parallel
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.servers.http import Deadlines, Retries
from slime_like.servers.processes import EngineProcess
from slime_like.servers.requests import RequestSettings
from slime_like.weights.hf_export import HfExport
from slime_like.weights.hf_import import load_hf_weights
from tests.dist.convert_worker import build
from tests.fake_sglang import engine_of


class Elsewhere(EngineProcess):
    """As of a server on another node, of which rank 2 is the first."""

    sender = 2
    exit_status = None

    def log_tail(self, characters: int = 600) -> str:
        return ""

    def end(self) -> None: ...

    def restart(self) -> Elsewhere:
        return self


ATTEMPTS = 3
SECONDS = 60.0  # of a call, on a loaded machine


def update(rank: int, world_size: int, arguments: dict[str, Any]) -> list[int]:
    """Every layout gives the servers its weights over every transport, twice. How many attempts
    each update took."""
    attempts, version = [], 0
    for sizes in arguments["layouts"]:
        with parallel(*sizes) as layout:
            chunks, hf, gpt = build(arguments["folder"], layout)
            load_hf_weights(chunks, arguments["folder"], hf=hf, gpt=gpt, layout=layout)
            for transport in arguments["transports"]:  # "nodes": see `Elsewhere`
                with engine_on(rank, transport, arguments) as engine:
                    for _ in range(2):
                        version += 1
                        tried = 0
                        while engine.weight_version != version:
                            tried += 1
                            assert tried <= ATTEMPTS
                            weights = HfExport(
                                chunks, hf=hf, gpt=gpt, layout=layout, bucket_bytes=arguments["bucket_bytes"]
                            ).stream()  # fmt: skip
                            engine.update_weights(weights, version)
                        attempts.append(tried)
    return attempts


@contextlib.contextmanager
def engine_on(rank: int, transport: str, arguments: dict[str, Any]) -> Iterator[SglangEngine]:
    delta, nodes = transport == "delta", transport == "nodes"
    if rank == 0:
        name = {"delta": "disk", "nodes": "tensor"}.get(transport, transport)
        servers: Any = [SimpleNamespace(url=url, images=None) for url in arguments["urls"]]
        with engine_of(
            arguments["folder"], servers, transport=name, synced=False, update_timeout_s=SECONDS, probe_timeout_s=SECONDS,
            keep_copy=False, delta={} if delta else None,
        ) as engine:  # fmt: skip
            assert engine.pool is not None
            if nodes:
                engine.pool.workers[-1].process = Elsewhere()
            yield engine
    else:
        requests = RequestSettings(Deadlines(5.0, SECONDS, SECONDS), Retries(1, 0.01, 0.02), 4)
        engine = SglangEngine(None, None, requests, arguments["folder"], check_updates=False)
        yield engine
        engine.close()
