"""Servers on several nodes: which GPUs each gets, and how rank 0 starts and ends those elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from slime_like.distributed.signed_store import SignedStore
from slime_like.errors import RunError
from slime_like.servers.node_agent import NodeAgent, RemoteNode, RemoteProcess
from slime_like.servers.nodes import Node, place_servers
from slime_like.servers.processes import Launch, ServerProcess, SpanningProcess
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi

KEY, RANK = b"of the job", 8


def of(nodes: int, gpus: int | None, processes: int = 8) -> list[Node]:
    return [Node(processes * n, processes, gpus, f"10.0.0.{n}", (1, 2)) for n in range(nodes)]


@pytest.mark.parametrize(
    ("nodes", "gpus", "per_server", "colocate", "first", "last", "count"),
    [
        (of(2, 8), 16, 2, True, [(0, 0, 2)], [(8, 6, 2)], 8),
        (of(2, 8), 16, 8, True, [(0, 0, 8)], [(8, 0, 8)], 2),
        (of(2, 8), 12, 3, True, [(0, 0, 3)], [(8, 3, 3)], 4),
        (of(4, 8), 32, 16, True, [(0, 0, 8), (8, 0, 8)], [(16, 0, 8), (24, 0, 8)], 2),
        (of(2, 8, processes=4), 8, 2, False, [(0, 4, 2)], [(4, 6, 2)], 4),
        (of(1, None, processes=2), 3, 1, False, [(0, 2, 1)], [(0, 4, 1)], 3),
        (of(2, None, processes=1), 2, 1, True, [(0, 0, 1)], [(1, 0, 1)], 2),
    ],
)
def test_places(
    nodes: list[Node],
    gpus: int,
    per_server: int,
    colocate: bool,
    first: list[tuple[int, int, int]],
    last: list[tuple[int, int, int]],
    count: int,
) -> None:
    """First rank of the node, first GPU and GPUs of each share of the first and the last server."""
    placed = place_servers(nodes, gpus, per_server, colocate=colocate)
    found = [[(s.node.rank, s.first_gpu, s.gpus) for s in shares] for shares in placed]
    assert (found[0], found[-1], len(found)) == (first, last, count)
    taken = [
        (s.node.rank, s.first_gpu + g) for shares in placed for s in shares for g in range(s.gpus)
    ]
    assert len(set(taken)) == len(taken) == gpus


@pytest.mark.parametrize(
    ("nodes", "gpus", "per_server", "colocate"),
    [(of(2, 8), 4, 2, False), (of(2, 8), 24, 12, True), (of(1, 8, processes=4), 8, 8, False)],
)
def test_no_room(nodes: list[Node], gpus: int, per_server: int, colocate: bool) -> None:
    with pytest.raises(RunError, match=f"--rollout-num-gpus {gpus}.* do not fit"):
        place_servers(nodes, gpus, per_server, colocate=colocate)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


@pytest.fixture
def node(store: dist.Store) -> Iterator[RemoteNode]:
    agent = NodeAgent(SignedStore(store, KEY), RANK)
    yield RemoteNode(SignedStore(store, KEY), RANK, "10.0.0.1")
    agent.close()


def program(folder: Path, words: str) -> Launch:
    code = f"import time; from pathlib import Path; Path('started').open('a').write('x'); {words}"
    command = f'cd {folder} && exec {sys.executable} -c "{code}"'
    return Launch(("sh", "-c", command), folder / "logs" / "engine.log")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_elsewhere(node: RemoteNode, tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = RemoteProcess(node, 0, program(tmp_path, "time.sleep(100)"))
    wait_until(started.exists)
    assert process.sender == RANK and process.exit_status is None
    process.end()
    assert node.state(0) is None
    again = process.restart()
    wait_until(lambda: started.read_text() == "xx")
    again.end()


def test_one_that_ends_by_itself(node: RemoteNode, tmp_path: Path) -> None:
    words = "print('no memory', flush=True); raise SystemExit(3)"
    process = RemoteProcess(node, 4, program(tmp_path, words))
    wait_until(lambda: process.exit_status is not None)
    assert process.exit_status == 3
    assert "no memory" in process.log_tail() and "engine.log on 10.0.0.1" in process.log_tail()
    again = process.restart()  # of which the old status says nothing
    wait_until(lambda: (tmp_path / "started").read_text() == "xx")
    wait_until(lambda: again.exit_status == 3)


def test_one_that_cannot_start(node: RemoteNode, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    process = RemoteProcess(node, 0, program(tmp_path, "pass"))
    wait_until(lambda: process.exit_status is not None)
    assert "logs" in process.log_tail()


def test_one_over_several_nodes(node: RemoteNode, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    stays = RemoteProcess(node, 0, program(folders[0], "time.sleep(100)"))
    ends = RemoteProcess(node, 1, program(folders[1], "raise SystemExit(5)"))
    full = SpanningProcess([stays, ends])
    wait_until(lambda: full.exit_status == 5)
    wait_until((folders[0] / "started").exists)
    again = full.restart()
    wait_until(lambda: all((f / "started").read_text() == "xx" for f in folders))
    again.end()
    assert node.state(0) is node.state(1) is None


def test_what_others_write_is_not_started(store: dist.Store, tmp_path: Path) -> None:
    """Whoever reaches the store's port may write there."""
    agent = NodeAgent(SignedStore(store, KEY), RANK)
    foreign = RemoteNode(SignedStore(store, b"another key"), RANK, "10.0.0.1")
    RemoteProcess(foreign, 0, program(tmp_path, "pass"))
    time.sleep(1.0)
    agent.close()
    assert not (tmp_path / "started").exists()


def test_a_fleet_that_is_closed_ends_what_was_started_for_it(tmp_path: Path) -> None:
    alone, *parts = [ServerProcess(program(tmp_path, "time.sleep(1000)")) for _ in range(3)]
    processes = [("http://a", alone), ("http://b", SpanningProcess(parts))]
    ServerPool([], processes, None, HealthSettings(), 1.0, api=SglangApi()).close()
    assert None not in [process.exit_status for process in (alone, *parts)]
