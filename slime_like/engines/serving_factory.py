"""Starts or finds the servers of a run, of either kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from arguments.rules.sglang import engine_url
from arguments.run_config import RunConfig
from arguments.schema import SglangConfig
from slime_like.distributed.collectives import on_rank_zero
from slime_like.distributed.failure_report import job
from slime_like.errors import RunError
from slime_like.servers.http import Deadlines, RequestFailed, Retries
from slime_like.servers.launches import ServerProgram, engine_launches, start_processes
from slime_like.servers.node_agent import NodeAgent
from slime_like.servers.nodes import Node, find_nodes
from slime_like.servers.processes import EngineProcess
from slime_like.servers.requests import RequestSettings
from slime_like.servers.router import Router
from slime_like.servers.server_api import ServerApi
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.weight_sync.settings import AdapterSettings, UpdateSettings
from slime_like.weight_sync.updater import WeightUpdater


class ServerKind(ABC):
    """What differs between kinds of servers."""

    api: ServerApi

    @abstractmethod
    def program(self, config: RunConfig, device: torch.device) -> ServerProgram:
        """The program of servers that the run starts, beside a trainer on `device`."""

    def router(self, config: SglangConfig, logs: Path) -> Router | None:
        """A router in front of the servers."""
        return None

    @abstractmethod
    def check(self, config: RunConfig, pool: ServerPool) -> None:
        """Check the settings of servers that answer. Raises RunError."""


def start_servers(
    kind: ServerKind,
    config: RunConfig,
    make_updater: Callable[[ServerPool], WeightUpdater],
    *,
    device: torch.device,
    logs: Path,
) -> tuple[ServerPool | None, WeightUpdater | None, NodeAgent | None]:
    """Start servers and router on all nodes and wait until they respond. Collective.

    Returns:
        The server pool and the weight updater on rank 0; the node agent on the first rank of every
        other node. No server has weights yet.

    Raises:
        RunError: On every rank, if a server does not respond.
    """
    sglang = config.sglang
    nodes = list[Node]()
    agent = None
    if sglang.rollout_num_gpus is not None:
        servers = sglang.rollout_num_gpus // sglang.rollout_num_gpus_per_engine
        nodes = find_nodes(servers, device)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank and any(node.rank == rank for node in nodes):
            agent = NodeAgent(job().store, rank)

    def start() -> tuple[ServerPool, WeightUpdater]:
        pool = start_pool(kind, config, nodes, device=device, logs=logs)
        return pool, make_updater(pool)

    try:
        pool, updater = on_rank_zero(start) or (None, None)
    except BaseException:
        if agent is not None:
            agent.close()
        raise
    return pool, updater, agent


def start_pool(
    kind: ServerKind,
    config: RunConfig,
    nodes: Sequence[Node],
    *,
    device: torch.device,
    logs: Path,
) -> ServerPool:
    sglang = config.sglang
    router = kind.router(sglang, logs)
    pool = None
    try:
        addresses = [engine_url(address) for address in sglang.rollout_external_engine_addrs or []]
        by_router = sglang.rollout_external_engine_addrs is None
        if router is not None and sglang.sglang_router_ip is not None:
            router.start(sglang.rollout_health_check_first_wait)
            if by_router and sglang.rollout_num_gpus is None:
                addresses = workers_of(router)
        health = HealthSettings(
            sglang.rollout_health_check_interval,
            sglang.rollout_health_check_timeout,
            sglang.rollout_health_check_first_wait,
        )
        started = list[tuple[str, EngineProcess]]()
        if sglang.rollout_num_gpus is not None:
            launches = engine_launches(sglang, kind.program(config, device), nodes, logs=logs)
            started = start_processes(launches)
        pool = ServerPool(
            addresses,
            started,
            router,
            health,
            sglang.rollout_connect_timeout_s,
            api=kind.api,
            joined_by_router=by_router,
        )
        if router is not None and sglang.sglang_router_ip is None:
            router.start(sglang.rollout_health_check_first_wait)
        pool.start()
        kind.check(config, pool)
        return pool
    except BaseException:
        if pool is not None:
            pool.close()
        elif router is not None:
            router.close()
        raise


def workers_of(router: Router) -> list[str]:
    try:
        workers = router.workers()
    except RequestFailed as failure:
        raise RunError(str(failure)) from None
    if not workers:
        raise RunError(f"router {router.url} has no workers; set --rollout-external-engine-addrs")
    return workers


def request_settings(config: SglangConfig) -> RequestSettings:
    deadlines = Deadlines(
        config.rollout_connect_timeout_s,
        config.rollout_read_timeout_s,
        config.rollout_request_timeout_s,
    )
    return RequestSettings(
        deadlines,
        Retries(attempts=config.rollout_request_attempts),
        config.sglang_server_concurrency,
    )


def update_settings(run: RunConfig) -> UpdateSettings:
    config = run.sglang
    adapter = None
    if run.sends_adapter:
        adapter = AdapterSettings(run.lora.lora_rank, run.lora.lora_alpha)
    assert config.update_weight_transport is not None, "completed when the command line is read"
    return UpdateSettings(
        transport=config.update_weight_transport,
        buffer_bytes=config.update_weight_buffer_size,
        timeout_s=config.update_weight_timeout_s,
        disk_dir=config.update_weight_disk_dir,
        keep_files=config.update_weight_disk_keep_files,
        keep_copy=not config.no_update_weight_copy,
        delta=config.update_weight_mode == "delta",
        local_dir=config.update_weight_local_checkpoint_dir,
        full_interval=config.update_weight_full_interval,
        adapter=adapter,
    )
