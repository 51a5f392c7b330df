"""Connections between the ranks of a job over gloo: closed by a rank that failed alone, so that the
others leave the collective in which they wait for it, and made anew by all ranks.

A collective of gloo ends early only when a connection of its group is closed, and closes with it
all later ones of that group; torch has no call for either (`abort` lets the waiting rank wait). So
the sockets that torch opens for its groups are remembered here, and a new backend is put under each
group, which everybody keeps. NCCL is not supported: it runs on streams of its own, and no test here
can show that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _world

from slime_like.errors import RunError

logger = logging.getLogger(__name__)
FDS = "/proc/self/fd"
CPU = torch.device("cpu")
# Number of a kind of backend that torch has not: a group keeps one backend of each kind, and a few
# threads with it, for ever. So there is a limit.
FIRST_KIND = 100
LAST_KIND = 120
JOIN_S = 60.0  # for all ranks to come to a renewal

_opened: dict[int, str] = {}  # sockets of the groups: descriptor -> its socket's name


def _sockets() -> dict[int, str]:
    """This process's sockets; none where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(FDS):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{FDS}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


@contextmanager
def opening_groups() -> Iterator[None]:
    """Remember the sockets that are opened in the block as those of process groups."""
    before = _sockets()
    yield
    _opened.update({fd: name for fd, name in _sockets().items() if before.get(fd) != name})


def can_renew() -> bool:
    """Whether the groups of this process can be freed and renewed: all are gloo's."""
    return bool(_opened) and all(dist.get_backend(group) == "gloo" for group in _groups())


def _groups() -> list[ProcessGroup]:
    """Groups of several ranks, in the order in which all ranks made them."""
    return [group for group in _world.pg_map if group.size() > 1]


def close_connections() -> None:
    """End every collective that another rank is in with this one. The groups cannot be used until
    all ranks `renew_groups`."""
    store = _store_port()
    for fd, name in _opened.items():
        if _sockets().get(fd) != name:  # closed since
            continue
        with socket.socket(fileno=os.dup(fd)) as connection, contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue  # listens
            if store not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)
    _opened.clear()


def _store_port() -> int:
    """Of the store of the job, whose connections stay."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else 0


_kinds = itertools.count(FIRST_KIND)


def renew_groups() -> None:
    """Make the connections of every group anew. Collective over all ranks of the job, after the
    same number of calls on each. Raises RunError if a rank does not come."""
    kind = next(_kinds)
    if kind > LAST_KIND:
        raise RunError(f"connections were renewed {kind - FIRST_KIND} times; restart the processes")
    close_connections()
    store = dist.distributed_c10d._get_default_store()
    try:
        with opening_groups():
            for group in _groups():
                backend = dist.ProcessGroupGloo(
                    dist.PrefixStore(f"renewed/{kind}/{group.group_name}", store),
                    group.rank(),
                    group.size(),
                    timedelta(seconds=JOIN_S),
                )
                backend._set_default_timeout(_timeout_of(group))
                group._register_backend(CPU, ProcessGroup.BackendType(kind), backend)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"not all ranks renewed their connections: {reason}") from error
    logger.info("the connections between the ranks were renewed")


def _timeout_of(group: ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(CPU).options._timeout
    return timeout
