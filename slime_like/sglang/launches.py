"""Servers started by the run: placement, command lines and processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from arguments.schema import SglangConfig
from arguments.sglang_install import interpreter
from slime_like.distributed.failure_report import job
from slime_like.errors import RunError
from slime_like.sglang.node_agent import RemoteNode, RemoteProcess
from slime_like.sglang.nodes import Node, address_towards, place_servers
from slime_like.sglang.processes import (
    EngineProcess,
    Launch,
    ServerProcess,
    SpanningProcess,
    server_command,
    server_settings,
)
from slime_like.weight_sync.transports.base import transport_traits

ROUTES_SETTING = "enable_return_routed_experts"  # server argument


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The part of a server that runs on one node."""

    node: Node
    url: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What servers load and report."""

    folder: str  # --hf-checkpoint
    dtype: str  # e.g. bfloat16
    reports_routed_experts: bool = False


def engine_launches(
    sglang: SglangConfig,
    model: ServedModel,
    nodes: Sequence[Node],
    *,
    device: torch.device,
    logs: Path,
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
        multi_node_settings: dict[str, object] = {}
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
            init_address = f"{host}:{next(ports[first.rank])}"
            multi_node_settings = {"nnodes": len(shares), "dist_init_addr": init_address}
        parts = list[ServerPart]()
        for node_rank, share in enumerate(shares):
            host = share.node.address
            port = next(ports[share.node.rank])
            settings: dict[str, object] = multi_node_settings | server_settings(
                model=model.folder,
                port=port,
                host=host,
                gpus=per_engine,
                base_gpu=share.first_gpu,
                dtype=model.dtype,
                cuda=device.type == "cuda",
                memory_saver=bool(sglang.offload_rollout),
                overrides=sglang.sglang_server_flags or {},
            )
            if multi_node_settings:
                settings["node_rank"] = node_rank
            if model.reports_routed_experts:
                settings[ROUTES_SETTING] = True
            log = logs / f"engine-{number}{f'-node-{node_rank}' if node_rank else ''}.log"
            command = server_command(interpreter(sglang.sglang_python), settings)
            parts.append(ServerPart(share.node, f"http://{host}:{port}", Launch(command, log)))
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
