"""Which ranks share a node."""

from __future__ import annotations

import os
import socket

from slime_like.distributed.collectives import gather


def ranks_by_node() -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, ascending, nodes in order of their first rank. A node consists of the
    processes of one torchrun agent, or without torchrun of one host. Collective."""
    names = gather(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    return tuple(
        tuple(rank for rank, other in enumerate(names) if other == name)
        for name in dict.fromkeys(names)
    )
