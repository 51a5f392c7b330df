"""The nodes of a run, and the GPUs on them of each server that the run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime_like.distributed.collectives import gather
from slime_like.distributed.nodes import ranks_by_node
from slime_like.errors import RunError
from slime_like.rollout.engines.sglang.processes import LOOPBACK, free_ports
from slime_like.rollout.engines.sglang.weight_transfer.process_group import address_towards

PORTS_OF_A_SERVER = 2  # its own, and that where the nodes of one meet


@dataclass(frozen=True, slots=True)
class Node:
    """rank: the first of the trainer's there. processes: how many it has there. gpus: None without
    CUDA. address: where its servers listen. ports: that were free a moment ago."""

    rank: int
    processes: int
    gpus: int | None
    address: str
    ports: tuple[int, ...]

    def first_gpu(self, *, colocate: bool) -> int:
        """Of those for servers: the trainer's own, or those behind them."""
        return 0 if colocate else self.processes

    def room(self, wanted: int, *, colocate: bool) -> int:
        """GPUs for servers. Without CUDA each process of the trainer counts as a GPU that is shared, and
        there is room for any number of others."""
        if colocate:
            return self.processes
        if self.gpus is None:
            return wanted
        return max(0, self.gpus - self.processes)


@dataclass(frozen=True, slots=True)
class Share:
    """What a server has on one node."""

    node: Node
    first_gpu: int
    gpus: int


def find_nodes(servers: int, device: torch.device) -> list[Node]:
    """By their first ranks. servers: that the run starts. A collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = next(ranks for ranks in ranks_by_node() if rank in ranks)
    mine = this_node(own, servers, device) if rank == own[0] else None
    return [node for node in gather(mine) if node is not None]


def this_node(ranks: Sequence[int], servers: int, device: torch.device) -> Node:
    """On its first rank. ranks: all that are there."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    # rank 0 talks to the servers, and nobody else does
    address = LOOPBACK if ranks[0] == 0 else address_of_this_host()
    most = servers if gpus is None else min(servers, gpus)
    ports = free_ports(PORTS_OF_A_SERVER * most, address)
    return Node(ranks[0], len(ranks), gpus, address, tuple(ports))


def address_of_this_host() -> str:
    """As rank 0 sees it; loopback where it runs here too."""
    return address_towards([f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"])


def place_servers(
    nodes: Sequence[Node], gpus: int, per_server: int, *, colocate: bool
) -> list[tuple[Share, ...]]:
    """What each server has, on one node or, where one is too small, on whole ones that follow each
    other. Raises RunError when there are too few GPUs.

    Args:
        gpus: of all servers; a multiple of per_server.
    """
    rooms = [node.room(gpus, colocate=colocate) for node in nodes]
    parts, placed = -(-per_server // max(max(rooms), 1)), list[tuple[Share, ...]]()
    if parts == 1:
        for node, room in zip(nodes, rooms, strict=True):
            first = node.first_gpu(colocate=colocate)
            starts = range(first, first + room - per_server + 1, per_server)
            placed += [(Share(node, start, per_server),) for start in starts]
    elif per_server % parts == 0:
        each = per_server // parts
        whole = [n for n, room in zip(nodes, rooms, strict=True) if room == each]
        for start in range(0, len(whole) - parts + 1, parts):
            chosen = whole[start : start + parts]
            placed.append(tuple(Share(n, n.first_gpu(colocate=colocate), each) for n in chosen))
    servers = gpus // per_server
    if len(placed) < servers:
        raise RunError(
            f"--rollout-num-gpus {gpus}: {servers} server(s) of --rollout-num-gpus-per-engine {per_server} do not fit; "
            f"GPUs for servers by node: {', '.join(map(str, rooms))}"
        )
    return placed[:servers]
