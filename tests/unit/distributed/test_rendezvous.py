"""How ranks meet, and what they say when they cannot: bounded, and by host, port and rank."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from slime_like.distributed.rendezvous import (
    Rendezvous,
    join_rendezvous,
    next_rendezvous,
    rendezvous_of,
)
from slime_like.errors import RunError
from tests.e2e.programs import free_port

HERE = socket.gethostname()
SHORT = timedelta(seconds=1.5)
LONG = timedelta(seconds=200)  # nothing waits for so long when it goes well
ENOUGH = timedelta(seconds=5)  # to connect to what listens on this host
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}


def cannot_meet(meeting: Rendezvous, timeout: timedelta = SHORT, most_s: float = 120.0) -> str:
    """The message; the wait must be bounded: torch waits for 5 minutes, or for ever."""
    start = time.monotonic()
    with pytest.raises(RunError) as raised:
        join_rendezvous(meeting, timeout)
    assert time.monotonic() - start < most_s
    where = (
        f"rank {meeting.rank} of {meeting.world_size} on host {HERE} could not meet the others at "
        f"{meeting.host}:{meeting.port} "
    )
    assert str(raised.value).startswith(where)
    return str(raised.value).removeprefix(where)


@pytest.fixture
def web_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_ranks_that_all_come_share_a_store() -> None:
    port = free_port()
    stores: dict[int, object] = {}

    def come(rank: int) -> None:
        stores[rank] = join_rendezvous(
            Rendezvous("127.0.0.1", port, rank, 3, hosts=rank == 0), LONG
        )

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stores) == [0, 1, 2]
    stores[0].set("word", "seen by all")  # type: ignore[attr-defined]
    assert stores[2].get("word") == b"seen by all"  # type: ignore[attr-defined]


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.distributed.rendezvous.NAME_S", 0.5)
    message = cannot_meet(
        Rendezvous("no-such-host.invalid", 29500, 1, 2, hosts=False), timedelta(minutes=10)
    )
    assert "this host does not know the name no-such-host.invalid" in message


def test_nobody_listens() -> None:
    message = cannot_meet(Rendezvous("127.0.0.1", free_port(), 1, 2, hosts=False))
    assert "nobody listened there for 1.5 s (Connection refused)" in message


def test_a_port_in_use_on_the_host_of_rank_0(web_server: int) -> None:
    message = cannot_meet(
        Rendezvous("127.0.0.1", web_server, 0, 2, hosts=True), timedelta(minutes=10)
    )
    assert f"port {web_server} of this host is in use by another program" in message


def test_another_program_answers_at_the_port(web_server: int) -> None:
    message = cannot_meet(Rendezvous("127.0.0.1", web_server, 1, 2, hosts=False), ENOUGH)
    assert "what listens there does not answer as rank 0 of a run would" in message


def test_missing_ranks_are_named() -> None:
    message = cannot_meet(Rendezvous("127.0.0.1", free_port(), 0, 40, hosts=True), ENOUGH)
    assert (
        f"ranks {', '.join(map(str, range(1, 17)))} and 23 more of 40 did not come within 5 s"
        in message
    )


def test_two_processes_of_one_rank() -> None:
    port, met = free_port(), []
    first, last = (Rendezvous("127.0.0.1", port, rank, 2, hosts=rank == 0) for rank in (0, 1))
    thread = threading.Thread(target=lambda: met.append(join_rendezvous(first, LONG)))
    thread.start()
    seen = connected(port)
    seen.wait(["attempt_0/run_0/slime_like/present/0"], LONG)
    message = cannot_meet(dataclasses.replace(first, hosts=False), LONG)
    assert "another process says that it is rank 0 too" in message
    join_rendezvous(last, LONG)
    thread.join()
    assert len(met) == 1, "the one that was first is not disturbed"


def connected(port: int) -> dist.TCPStore:
    """To the store that another thread begins to hold."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LONG)


def listening_addresses(port: int) -> set[str]:
    """Of this host, as the kernel writes them."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        address.rpartition(":")[0]
        for _, address, _, state, *_ in lines
        if state == "0A" and int(address.rpartition(":")[2], 16) == port
    }


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5"])
def test_the_store_listens_on_the_address_of_the_master_alone(host: str) -> None:
    """torch's listens on every interface of the host, for everybody."""
    port = free_port()
    store = join_rendezvous(
        Rendezvous(host, port, 0, 1, hosts=True), LONG
    )  # listens while it is there
    last = host.rpartition(".")[2] if host != "localhost" else "1"
    assert store and listening_addresses(port) == {f"0{last}00007F"}


def test_an_address_of_another_host_is_listened_to_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As behind a translated address; rank 0 does not reach itself by one that nobody has."""
    meeting = Rendezvous("192.0.2.1", free_port(), 0, 1, hosts=True)
    cannot_meet(meeting, SHORT)
    assert "MASTER_ADDR 192.0.2.1 is no address of this host" in caplog.text


@pytest.mark.parametrize("text", ["", "x", "999", "\0"])
def test_garbage_in_the_store_ends_no_rank(text: str) -> None:
    """What torch's counters make of it: the connection of whoever counts is closed."""
    port, stores = free_port(), {}
    garbage = threading.Event()

    def come(rank: int) -> None:
        stores[rank] = join_rendezvous(
            Rendezvous("127.0.0.1", port, rank, 2, hosts=rank == 0), LONG
        )
        garbage.wait()

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    threads[0].start()
    other = connected(port)
    for name in ("present", "errors", "failed/1", "failed"):
        other.set(f"attempt_0/run_0/slime_like/{name}", text)
    threads[1].start()
    garbage.set()
    for thread in threads:
        thread.join()
    assert sorted(stores) == [0, 1]


def test_ranks_of_agents_that_count_other_restarts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that returns has seen no restart. Of a store that outlives its ranks an earlier
    meeting is not this one."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    port, met = free_port(), []
    first = Rendezvous("127.0.0.1", port, 0, 2, hosts=True)
    thread = threading.Thread(target=lambda: met.append(join_rendezvous(first, LONG)))
    thread.start()
    connected(port).wait(["attempt_0/run_0/slime_like/present/0"], LONG)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    join_rendezvous(Rendezvous("127.0.0.1", port, 1, 2, hosts=False), LONG)
    thread.join()
    assert len(met) == 1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    late = Rendezvous("127.0.0.1", port, 0, 1, hosts=False)
    join_rendezvous(late, LONG)
    assert connected(port).check(["attempt_1/run_0/slime_like/present/0"])


def test_runs_of_one_process_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's, with two runs in each of two processes."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LONG)
    environment = {
        **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"
    }  # fmt: skip
    runs = {0: itertools.count(), 1: itertools.count()}  # one in each process
    met: list[tuple[int, int]] = []

    def meet(rank: int) -> None:
        place = meetings[rank]
        assert place is not None
        rendezvous = dataclasses.replace(place, rank=rank)
        store = join_rendezvous(rendezvous, LONG)
        store.set(f"seen/{rank}", "here")
        met.append((rendezvous.run, rank))

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for run in range(2):
        meetings = {}
        for rank in (0, 1):
            monkeypatch.setattr("slime_like.distributed.rendezvous._runs", runs[rank])
            meetings[rank] = next_rendezvous()
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert agent.check([f"attempt_0/run_{run}/seen/{rank}" for rank in (0, 1)])
    assert sorted(met) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_environment_says_where_to_meet() -> None:
    assert rendezvous_of(ENVIRONMENT) == Rendezvous("alpha", 29500, 1, 2, hosts=False)
    assert rendezvous_of(ENVIRONMENT | {"RANK": "0"}).hosts
    assert not rendezvous_of(
        ENVIRONMENT | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).hosts, "torchrun's agent does"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be set too"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT must be set too"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT=port in the environment is not a number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment is no port"),
        ({"RANK": "2"}, "RANK=2 in the environment must be below WORLD_SIZE=2"),
    ],
)
def test_a_wrong_environment_is_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(RunError, match=words):
        rendezvous_of(ENVIRONMENT | changes)
