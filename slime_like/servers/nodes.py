"""Nodes of a run, and placement of servers on their GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime_like.distributed.collectives import gather
from slime_like.distributed.nodes import ranks_by_node
from slime_like.errors import RunError
from slime_like.servers.processes import LOOPBACK, free_ports

PORTS_OF_A_SERVER = 2  # HTTP, and the rendezvous of a multi-node server


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the run."""

    rank: int  # its first trainer rank
    processes: int  # number of trainer ranks there
    gpus: int | None  # None without CUDA
    address: str  # where its servers listen
    ports: tuple[int, ...]  # recently free ports

    def first_gpu(self, *, colocate: bool) -> int:
        """First GPU for servers: with colocate the trainer's first, otherwise the one after the
        trainer's."""
        return 0 if colocate else self.processes

    def room(self, num_gpus: int, *, colocate: bool) -> int:
        """Number of GPUs for servers. Without CUDA, each trainer process counts as one shared GPU,
        and the number of other GPUs is unlimited."""
        if colocate:
            return self.processes
        if self.gpus is None:
            return num_gpus
        return max(0, self.gpus - self.processes)


@dataclass(frozen=True, slots=True)
class Share:
    """GPUs of a server on one node."""

    node: Node
    first_gpu: int
    gpus: int


def find_nodes(servers: int, device: torch.device) -> list[Node]:
    """All nodes, ordered by first rank. servers: number of servers to start. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    node_ranks = next(ranks for ranks in ranks_by_node() if rank in ranks)
    local_node = this_node(node_ranks, servers, device) if rank == node_ranks[0] else None
    return [node for node in gather(local_node) if node is not None]


def this_node(ranks: Sequence[int], servers: int, device: torch.device) -> Node:
    """This node; called on its first rank. ranks: all trainer ranks of the node."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    # only rank 0 talks to servers, so those on its node can listen on loopback
    address = LOOPBACK if ranks[0] == 0 else address_of_this_host()
    most = servers if gpus is None else min(servers, gpus)
    ports = free_ports(PORTS_OF_A_SERVER * most, address)
    return Node(ranks[0], len(ranks), gpus, address, tuple(ports))


def address_of_this_host() -> str:
    """Address of this host as seen by rank 0; loopback on rank 0's host."""
    return address_towards([f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"])


def place_servers(
    nodes: Sequence[Node], gpus: int, per_server: int, *, colocate: bool
) -> list[tuple[Share, ...]]:
    """Place each server on one node, or on consecutive full nodes if one is too small. Raises
    RunError if there are too few GPUs.

    Args:
        gpus: GPUs of all servers; a multiple of per_server.
    """
    rooms = [node.room(gpus, colocate=colocate) for node in nodes]
    parts = -(-per_server // max(max(rooms), 1))
    placements = list[tuple[Share, ...]]()
    if parts == 1:
        for node, room in zip(nodes, rooms, strict=True):
            first = node.first_gpu(colocate=colocate)
            starts = range(first, first + room - per_server + 1, per_server)
            placements += [(Share(node, start, per_server),) for start in starts]
    elif per_server % parts == 0:
        gpus_per_node = per_server // parts
        free_nodes = [n for n, room in zip(nodes, rooms, strict=True) if room == gpus_per_node]
        for start in range(0, len(free_nodes) - parts + 1, parts):
            chosen = free_nodes[start : start + parts]
            placements.append(
                tuple(Share(n, n.first_gpu(colocate=colocate), gpus_per_node) for n in chosen)
            )
    servers = gpus // per_server
    if len(placements) < servers:
        raise RunError(
            f"--rollout-num-gpus {gpus}: {servers} server(s) of --rollout-num-gpus-per-engine "
            f"{per_server} do not fit; GPUs for servers by node: {', '.join(map(str, rooms))}"
        )
    return placements[:servers]


def address_towards(urls: Sequence[str]) -> str:
    """This host's address as the servers see it; loopback if all of them are on this host."""
    for url in urls:
        host = urlsplit(url).hostname
        port = urlsplit(url).port or 80
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # connecting sends nothing
            s.connect((host, port))
            if not str(s.getsockname()[0]).startswith("127."):
                return str(s.getsockname()[0])
    return "127.0.0.1"
