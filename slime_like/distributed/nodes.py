"""Which ranks share a node."""

from __future__ import annotations

import os
import socket

from slime_like.distributed.collectives import gather


def ranks_by_node() -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in their order, by their first ones. Processes of one agent of
    torchrun are a node, else those of one host. A collective."""
    names = gather(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    return tuple(
        tuple(rank for rank, other in enumerate(names) if other == name)
        for name in dict.fromkeys(names)
    )
