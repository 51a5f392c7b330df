"""Which ranks share a node."""

from __future__ import annotations

import os
import socket

from slime_like.distributed.collectives import gather


def ranks_by_node() -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, ascending, nodes in order of their first rank. A node consists of the
    processes of one torchrun agent, or without torchrun of one host. Collective."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(
        gather(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    ):
        nodes.setdefault(name, []).append(rank)
    return tuple(map(tuple, nodes.values()))
