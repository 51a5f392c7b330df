"""Weight updates of servers by several ranks: each sends what it has, and what a server refuses in
the middle is sent again to those that are left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.ranks import run_ranks
from tests.dist.convert_worker import stored_weights
from tests.dist.test_convert_moe import make_models
from tests.fake_sglang import FakeServer, fake_servers

# tensor, pipeline, virtual, expert, expert-tensor
STAGES_AND_EXPERTS, CUT_EXPERTS = (1, 2, 1, 2, 1), (2, 2, 1, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_models(tmp_path_factory.mktemp("model"), ["qwen3-moe"])["qwen3-moe"]


class Received:
    """What a server was given in each update."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.updates: list[dict[str, Tensor]] = []
        server.spoil = lambda weights: self.updates.append(dict(weights))


def groups_of(server: FakeServer) -> list[str]:
    """In which buckets were broadcast, in their order."""
    return [
        b["group_name"] for path, b in server.seen if path == "/update_weights_from_distributed"
    ]


def same_weights(found: dict[str, Tensor], folder: str) -> bool:
    stored = stored_weights(folder)
    return found.keys() == stored.keys() and all(
        found[name].dtype == stored[name].dtype and torch.equal(found[name], stored[name])
        for name in stored
    )


def results_of_ranks(
    folder: str,
    servers: Sequence[FakeServer],
    layouts: Any,
    transports: Sequence[str],
    tmp_path: Path,
) -> list[Any]:
    """Of four, which send the model in `folder`; small buckets make several of it."""
    arguments = {
        "folder": folder, "layouts": layouts, "transports": list(transports), "urls": [s.url for s in servers],
        "bucket_bytes": 2**14,
    }  # fmt: skip
    worker = "tests.dist.weight_update_worker:update"
    return run_ranks(worker, 4, tmp_path, arguments, timeout_s=240)


def test_every_rank_sends_its_own(folder: str, tmp_path: Path) -> None:
    layouts = [STAGES_AND_EXPERTS, CUT_EXPERTS]
    with fake_servers(folder, 2) as servers:
        received = [Received(server) for server in servers]
        transports = ("disk", "broadcast", "delta", "nodes")
        results = results_of_ranks(folder, servers, layouts, transports, tmp_path)
    assert results == [[1] * 16] * 4
    for of_server in received:
        assert len(of_server.updates) == 16
        assert all(same_weights(found, folder) for found in of_server.updates)
        used = groups_of(of_server.server)
        senders = 4 + 2  # stages times experts' ranks; stages
        assert len(set(used)) == senders < len(used) / 4  # kept from update to update
    files = {body["model_path"] for path, body in servers[0].seen if path.endswith("from_disk")}
    assert len(files) == 4 + 2  # each time one; for changes one copy
    assert groups_of(servers[0]) == groups_of(servers[1])


@pytest.mark.extended
def test_a_server_that_is_lost_in_the_middle(folder: str, tmp_path: Path) -> None:
    """The sender, which is not rank 0, stops waiting for it; the next attempt is for those that are there."""
    with fake_servers(folder, 2) as servers:
        received = [Received(server) for server in servers]
        receive, taken = servers[1].receive, []

        def lost(body: Any) -> None:
            taken.append(body["group_name"])
            if len(set(taken)) == 3:
                raise ConnectionError("lost")
            receive(body)

        servers[1].receive = lost  # type: ignore[method-assign]
        results = results_of_ranks(folder, servers, [STAGES_AND_EXPERTS], ["broadcast"], tmp_path)
    assert results == [results[0]] * 4 and results[0][0] > 1
    assert len(received[0].updates) == 2
    # it may be back for a later attempt
    assert all(same_weights(found, folder) for r in received for found in r.updates)


def test_a_server_on_another_node_that_fails(folder: str, tmp_path: Path) -> None:
    """It is out; the one on rank 0's node has all weights, of the same attempt."""
    with fake_servers(folder, 2) as servers:
        received = [Received(server) for server in servers]
        take, taken = servers[1].take, []

        def lost(body: Any) -> None:
            taken.append(1)
            if len(taken) == 3:
                raise ConnectionError("lost")
            take(body)

        servers[1].take = lost  # type: ignore[method-assign]
        results = results_of_ranks(folder, servers, [STAGES_AND_EXPERTS], ["nodes"], tmp_path)
    assert results == [[1, 1]] * 4
    assert len(received[0].updates) == 2 and len(taken) >= 3
    assert all(same_weights(found, folder) for r in received for found in r.updates)
