"""Rendezvous of the ranks of a run, with a hard time limit and errors that name host, port and
rank.

torch waits several times longer than its timeout, and forever if another program answers at the
port; here one deadline applies to everything. torch's store listens on all interfaces without
authentication; here it listens on the address of MASTER_ADDR only."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from slime_like.errors import RunError

RETRY_S = 0.2
NAME_S = 10.0  # how long to retry resolving a host name
MAX_NAMES = 16  # maximum number of missing ranks to list in a message
BACKLOG = 4096  # all ranks connect at the same time, with several connections each
logger = logging.getLogger(__name__)
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the rendezvous, and this process's rank."""

    host: str
    port: int
    rank: int
    world_size: int
    # whether this process holds the store that the others connect to; under torchrun the agent on
    # the first node holds it
    hosts: bool
    one_host: bool = False  # whether all ranks are on this host
    # of the runs that follow each other in this process, which share a store that outlives them;
    # every rank takes part in every run and counts the same
    run: int = 0

    def me(self) -> str:
        return f"rank {self.rank} of {self.world_size} on host {socket.gethostname()}"

    def failed(self, why: str) -> RunError:
        return RunError(
            f"{self.me()} could not meet the others at {self.host}:{self.port} "
            f"(MASTER_ADDR:MASTER_PORT): {why}"
        )


def rendezvous_of(environment: Mapping[str, str]) -> Rendezvous:
    """Read the rendezvous from the environment variables that torchrun or another launcher has set.
    Raises RunError if they are missing or invalid."""
    values = {
        name: environment.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise RunError(
            f"RANK is set, so this is one of several processes, and {' and '.join(missing)} must "
            "be set too; torchrun sets all"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not values[name].isdecimal():
            raise RunError(f"{name}={values[name]} in the environment is not a number")
        numbers[name] = int(values[name])
    if not 0 < numbers["MASTER_PORT"] < 2**16:
        raise RunError(
            f"MASTER_PORT={numbers['MASTER_PORT']} in the environment is no port; ports are 1 to "
            "65535"
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise RunError(
            f"RANK={numbers['RANK']} in the environment must be below "
            f"WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    in_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = numbers["RANK"] == 0 and not in_agent
    return Rendezvous(
        values["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        hosts,
        environment.get("LOCAL_WORLD_SIZE") == values["WORLD_SIZE"],
    )


def join_rendezvous(rendezvous: Rendezvous, timeout: timedelta) -> dist.Store:
    """Connect to the store and wait until all ranks have joined. Raises RunError after about
    `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    _resolve(rendezvous, deadline)
    if not rendezvous.hosts:
        _wait_for_listener(rendezvous, deadline, timeout)
    raw = _connect(rendezvous, deadline, timeout)
    store = dist.PrefixStore(f"attempt_{_attempt()}/run_{rendezvous.run}", raw)
    _wait_for_all(store, rendezvous, deadline, timeout)
    return store


def _attempt() -> str:
    """Number of the attempt, which separates the keys of restarts in torchrun's store; it outlives
    the ranks. A store of rank 0 is always new, so its attempt is 0: each agent counts restarts
    separately, and the count of one that joined late would differ."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"


def _resolve(rendezvous: Rendezvous, deadline: float) -> None:
    """Check that the host name resolves, to report a wrong name early. Retries for NAME_S, since
    name servers can fail briefly."""
    deadline = min(deadline, time.monotonic() + NAME_S)
    while True:
        try:
            socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise rendezvous.failed(
                    f"this host does not know the name {rendezvous.host} ({error.args[-1]})"
                ) from error
        time.sleep(RETRY_S)


def _wait_for_listener(rendezvous: Rendezvous, deadline: float, timeout: timedelta) -> None:
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(
                (rendezvous.host, rendezvous.port), timeout=max(left, RETRY_S)
            ).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise rendezvous.failed(
                    f"nobody listened there for {_seconds(timeout)} ({error.strerror or error}): a "
                    "wrong address, a firewall, or rank 0 did not start; "
                    "--distributed-timeout-minutes waits longer"
                ) from error
        time.sleep(RETRY_S)


def _listen(rendezvous: Rendezvous) -> socket.socket | None:
    """Listen on the address of MASTER_ADDR only. None if torch has to listen on all interfaces,
    because other hosts resolve the name to another address."""
    found = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if _is_loopback(str(address[0])) and not (
        rendezvous.one_host or rendezvous.host == "localhost" or _is_loopback(rendezvous.host)
    ):
        return None  # e.g. Debian's /etc/hosts maps the own host name to 127.0.1.1
    try:
        return socket.create_server(
            (str(address[0]), rendezvous.port), family=family, backlog=BACKLOG
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise rendezvous.failed(_in_use(rendezvous)) from error
        if error.errno != errno.EADDRNOTAVAIL:
            raise rendezvous.failed(error.strerror or str(error)) from error
    logger.warning(
        "MASTER_ADDR %s is no address of this host: the store of this run listens on all "
        "interfaces, at port %d",
        rendezvous.host,
        rendezvous.port,
    )
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _in_use(rendezvous: Rendezvous) -> str:
    return (
        f"port {rendezvous.port} of this host is in use by another program; give another "
        "MASTER_PORT, or end that program"
    )


def _connect(rendezvous: Rendezvous, deadline: float, timeout: timedelta) -> dist.Store:
    """Listen, on the rank that holds the store, and connect. In a thread, because torch waits
    forever if another program answers at the port."""
    results: list[dist.Store] = []
    errors: list[str] = []
    listener = _listen(rendezvous) if rendezvous.hosts else None

    def run() -> None:
        try:
            results.append(
                dist.TCPStore(
                    rendezvous.host,
                    rendezvous.port,
                    is_master=rendezvous.hosts,
                    timeout=timeout,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=None if listener is None else listener.detach(),
                )
            )
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    thread.join(max(RETRY_S, deadline - time.monotonic()))
    if results:
        return results[0]
    if errors and ("EADDRINUSE" in errors[0] or "already in use" in errors[0]):
        raise rendezvous.failed(_in_use(rendezvous))
    if errors:
        raise rendezvous.failed(errors[0])
    if rendezvous.hosts:
        raise rendezvous.failed(
            f"rank 0 listens on this host, and {rendezvous.host} leads elsewhere: MASTER_ADDR must "
            "be the host of rank 0"
        )
    raise rendezvous.failed(
        "what listens there does not answer as rank 0 of a run would: the port is another "
        "program's; give another MASTER_PORT"
    )


def _wait_for_all(
    store: dist.Store, rendezvous: Rendezvous, deadline: float, timeout: timedelta
) -> None:
    """Wait until all ranks have joined, polling with one request for any number of ranks. It does
    not count with `add`, which closes the connection if another program wrote the value."""
    everybody = [f"slime_like/present/{rank}" for rank in range(rendezvous.world_size)]
    token = secrets.token_hex(8)
    try:
        if store.compare_set(everybody[rendezvous.rank], "", token) != token.encode():
            raise rendezvous.failed(f"another process says that it is rank {rendezvous.rank} too")
        while not store.check(everybody):
            if time.monotonic() > deadline:
                ranks = _missing(store, rendezvous.world_size)
                raise rendezvous.failed(f"{ranks} did not come within {_seconds(timeout)}")
            time.sleep(RETRY_S)
    except dist.DistError as error:  # rank 0 has given up and closed the store
        raise rendezvous.failed(
            f"the store there is gone, so rank 0 has ended ({str(error).splitlines()[0]})"
        ) from error


def _missing(store: dist.Store, world_size: int) -> str:
    ranks = [
        str(rank) for rank in range(world_size) if not store.check([f"slime_like/present/{rank}"])
    ]
    named = ", ".join(ranks[:MAX_NAMES])
    if len(ranks) > MAX_NAMES:
        named += f" and {len(ranks) - MAX_NAMES} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {named} of {world_size}"


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"


def environment_rendezvous() -> Rendezvous | None:
    """The rendezvous of this process's environment; None for a single process."""
    return rendezvous_of(os.environ) if "RANK" in os.environ else None


def next_rendezvous() -> Rendezvous | None:
    """`environment_rendezvous` of a further run of this process."""
    rendezvous = environment_rendezvous()
    return None if rendezvous is None else replace(rendezvous, run=next(_runs))
