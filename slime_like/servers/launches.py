"""Servers started by the run: placement, command lines and processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments.schema import SglangConfig
from slime_like.distributed.failure_report import job
from slime_like.errors import RunError
from slime_like.servers.node_agent import RemoteNode, RemoteProcess
from slime_like.servers.nodes import Node, address_towards, place_servers
from slime_like.servers.processes import (
    EngineProcess,
    Launch,
    ServerProcess,
    SpanningProcess,
)
from slime_like.weight_sync.transports.base import transport_traits


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The part of a server that runs on one node."""

    node: Node
    url: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one part of a server runs."""

    host: str
    port: int
    gpus: int  # of the whole server
    first_gpu: int
    # of a server on several nodes: their number, the part's number, and where they meet
    nodes: int = 1
    node_rank: int = 0
    meeting: str | None = None


class ServerProgram(ABC):
    """The program that a server is."""

    @abstractmethod
    def command(self, slot: Slot) -> tuple[str, ...]: ...

    def environment(self, slot: Slot) -> Mapping[str, str]:
        return {}


def engine_launches(
    sglang: SglangConfig, program: ServerProgram, nodes: Sequence[Node], *, logs: Path
) -> list[list[ServerPart]]:
    """The parts of each server; the first part serves HTTP. Raises RunError if the nodes have too
    few GPUs."""
    assert sglang.rollout_num_gpus is not None
    per_engine = sglang.rollout_num_gpus_per_engine
    placements = place_servers(nodes, sglang.rollout_num_gpus, per_engine, colocate=sglang.colocate)
    require_reachable(sglang, {share.node.rank for shares in placements for share in shares})
    ports = {node.rank: iter(node.ports) for node in nodes}
    servers = list[list[ServerPart]]()
    for number, shares in enumerate(placements):
        meeting: str | None = None
        if len(shares) > 1:
            if transport_traits(sglang.update_weight_transport).same_gpu:
                raise RunError(
                    f"--update-weight-transport {sglang.update_weight_transport}: a server of "
                    f"--rollout-num-gpus-per-engine {per_engine} spans {len(shares)} nodes, and "
                    "GPU memory handles are valid on one; legal values: disk, tensor"
                )
            first = shares[0].node
            second = shares[1].node
            host = first.address if first.rank else address_towards([f"http://{second.address}:1"])
            meeting = f"{host}:{next(ports[first.rank])}"
        parts = list[ServerPart]()
        for node_rank, share in enumerate(shares):
            host = share.node.address
            port = next(ports[share.node.rank])
            slot = Slot(host, port, per_engine, share.first_gpu, len(shares), node_rank, meeting)
            log = logs / f"engine-{number}{f'-node-{node_rank}' if node_rank else ''}.log"
            launch = Launch(program.command(slot), log, program.environment(slot))
            parts.append(ServerPart(share.node, f"http://{host}:{port}", launch))
        servers.append(parts)
    return servers


def require_reachable(config: SglangConfig, ranks: Collection[int]) -> None:
    """Raise RunError if weights would go through a folder that only one node sees. ranks: the first
    rank of each node with servers."""
    if (
        transport_traits(config.update_weight_transport).uses_folder
        and config.update_weight_disk_dir is None
        and any(ranks)
    ):
        raise RunError(
            f"--update-weight-disk-dir is missing: servers on {len(ranks)} nodes need a shared "
            "folder, with the same path on all of them"
        )


def start_processes(servers: Sequence[Sequence[ServerPart]]) -> list[tuple[str, EngineProcess]]:
    """Start the servers; on other nodes through their agents. Returns (address, process) pairs."""
    remote: dict[int, RemoteNode] = {}
    started = list[tuple[str, EngineProcess]]()
    for number, parts in enumerate(servers):
        processes = list[EngineProcess]()
        for part in parts:
            rank = part.node.rank
            if rank and rank not in remote:
                remote[rank] = RemoteNode(job().store, rank, part.node.address)
            if rank:
                processes.append(RemoteProcess(remote[rank], number, part.launch))
            else:
                processes.append(ServerProcess(part.launch))
        process = processes[0] if len(processes) == 1 else SpanningProcess(processes)
        started.append((parts[0].url, process))
    return started
