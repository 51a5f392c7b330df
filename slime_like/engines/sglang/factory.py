"""Build the SGLang engine from the run's configuration: find or start servers and the router."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from arguments.hf.moe import moe_layers
from arguments.rules.sglang import engine_url
from arguments.run_config import RunConfig
from arguments.schema import SglangConfig
from arguments.sglang_install import interpreter, packages_of
from slime_like.distributed.collectives import on_rank_zero
from slime_like.distributed.failure_report import job
from slime_like.engines.registry import EngineContext
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.sglang.http import CONTROL_S, Deadlines, RequestFailed, Retries
from slime_like.sglang.launches import ROUTES_SETTING, ServedModel, engine_launches, start_processes
from slime_like.sglang.node_agent import NodeAgent
from slime_like.sglang.nodes import Node, find_nodes
from slime_like.sglang.processes import LOOPBACK, EngineProcess, Launch, free_ports, router_command
from slime_like.sglang.requests import RequestSettings
from slime_like.sglang.routed_experts import RoutesFormat
from slime_like.sglang.router import Router
from slime_like.sglang.server_pool import HealthSettings, ServerPool
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.transports.handles import without_broken_handles
from slime_like.weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)


def make_sglang_engine(context: EngineContext) -> SglangEngine:
    """Build the engine. Collective; see `start_servers`. Server logs are in the run's folder under
    engines, on the server's node."""
    config = context.config
    device = context.device
    assert config.model.hf_checkpoint is not None
    model = config.model.hf_checkpoint
    settings = update_settings(config.sglang)
    python = interpreter(config.sglang.sglang_python)
    transport = without_broken_handles(settings.transport, python, device)
    settings = replace(settings, transport=transport)
    pool, updater, agent = start_servers(
        config,
        lambda pool: WeightUpdater(pool, settings, model, device),
        device=device,
        logs=context.output_dir / "engines",
    )
    return SglangEngine(
        pool,
        updater,
        replace(request_settings(config.sglang), images=context.image_processor),
        model,
        check_updates=config.sglang.check_weight_update_equal,
        colocated=bool(config.sglang.offload_rollout),
        routed_experts=routes_format(config),
        agent=agent,
    )


def start_servers(
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
        pool = start_pool(config, nodes, device=device, logs=logs)
        return pool, make_updater(pool)

    try:
        pool, updater = on_rank_zero(start) or (None, None)
    except BaseException:
        if agent is not None:
            agent.close()
        raise
    return pool, updater, agent


def start_pool(
    config: RunConfig, nodes: Sequence[Node], *, device: torch.device, logs: Path
) -> ServerPool:
    sglang = config.sglang
    router = make_router(sglang, logs)
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
            launches = engine_launches(
                sglang, served_model(config), nodes, device=device, logs=logs
            )
            started = start_processes(launches)
        pool = ServerPool(
            addresses,
            started,
            router,
            health,
            sglang.rollout_connect_timeout_s,
            joined_by_router=by_router,
        )
        if router is not None and sglang.sglang_router_ip is None:
            router.start(sglang.rollout_health_check_first_wait)
        pool.start()
        if config.rollout.use_rollout_routing_replay:
            require_routed_experts(pool)
        return pool
    except BaseException:
        if pool is not None:
            pool.close()
        elif router is not None:
            router.close()
        raise


def served_model(config: RunConfig) -> ServedModel:
    """What the servers of a run load and report."""
    assert config.model.hf_checkpoint is not None, "checked on the command line"
    return ServedModel(
        config.model.hf_checkpoint,
        str(config.megatron.transformer.params_dtype).removeprefix("torch."),
        config.rollout.use_rollout_routing_replay,
    )


def routes_format(config: RunConfig) -> RoutesFormat | None:
    """The format of routed experts; None for a dense model."""
    transformer = config.megatron.transformer
    if not transformer.num_moe_experts:
        return None
    return RoutesFormat(
        tuple(moe_layers(transformer.moe_layer_freq, transformer.num_layers)),
        transformer.moe_router_topk,
        transformer.num_moe_experts,
    )


def require_routed_experts(pool: ServerPool) -> None:
    """Raise RunError naming a server that does not report routed experts."""
    if pool.router is not None:
        logger.info("rollout requests bypass sglang_router, which drops return_routed_experts")
    for worker in pool.alive():
        try:
            info = pool.call(worker, "/server_info", timeout_s=CONTROL_S, method="GET")
        except RequestFailed as failure:
            raise RunError(str(failure)) from None
        if info.get(ROUTES_SETTING) is False:
            raise RunError(
                f"--use-rollout-routing-replay: the engine {worker.url} does not report routed "
                "experts; start it with --enable-return-routed-experts"
            )


def workers_of(router: Router) -> list[str]:
    try:
        workers = router.workers()
    except RequestFailed as failure:
        raise RunError(str(failure)) from None
    if not workers:
        raise RunError(f"router {router.url} has no workers; set --rollout-external-engine-addrs")
    return workers


def make_router(config: SglangConfig, logs: Path) -> Router | None:
    if config.no_sglang_router:
        return None
    if config.sglang_router_ip is not None:
        return Router(
            f"http://{config.sglang_router_ip}:{config.sglang_router_port}",
            None,
            config.rollout_connect_timeout_s,
        )
    python = interpreter(config.sglang_python)
    if packages_of(python)[1] is None:  # without sglang_router
        python = interpreter(None)
    free_port, metrics_port = free_ports(2)
    port = config.sglang_router_port or free_port
    settings = {
        "host": LOOPBACK,
        "port": port,
        "prometheus_host": LOOPBACK,
        "prometheus_port": metrics_port,
        "log_level": "warn",
        "request_timeout_secs": int(config.rollout_request_timeout_s) + 1,
        "retry_max_retries": 2,
        "health_check_interval_secs": 5,
    }
    command = router_command(python, settings | (config.sglang_router_flags or {}))
    return Router(
        f"http://{LOOPBACK}:{port}",
        Launch(command, logs / "router.log"),
        config.rollout_connect_timeout_s,
    )


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


def update_settings(config: SglangConfig) -> UpdateSettings:
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
    )
