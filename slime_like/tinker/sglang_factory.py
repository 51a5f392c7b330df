"""Starts SGLang servers that sample for the Tinker server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from arguments.hf.lora_modules import target_modules
from arguments.hf.model import read_hf_model
from arguments.run_config import RunConfig
from slime_like.engines.serving_factory import request_settings, start_servers
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import (
    AdapterNeeds,
    SglangKind,
    SglangProgram,
    left_out,
    require_adapters,
    require_base_model,
)
from slime_like.images.processor import ImageProcessor
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.servers.server_pool import ServerPool
from slime_like.tinker.sglang_adapters import KeptBaseTransport, ServedAdapters
from slime_like.tinker.sglang_sampler import SglangSampler
from slime_like.tinker.sglang_snapshots import (
    SnapshotTransport,
    snapshot_transport,
    snapshot_updater,
)
from slime_like.weight_sync.updater import WeightUpdater

ALL = ("all-linear", "unembed")


class AdapterServers(SglangKind):
    """Servers that take the adapters of every client up to --max-adapter-rank."""

    def program(self, config: RunConfig, device: torch.device) -> SglangProgram:
        return replace(super().program(config, device), adapter=client_needs(config))

    def check(self, config: RunConfig, pool: ServerPool) -> None:
        super().check(config, pool)
        require_adapters(pool, client_needs(config))
        if config.sglang.rollout_num_gpus is None:
            require_base_model(pool, str(config.model.hf_checkpoint))


def client_needs(config: RunConfig) -> AdapterNeeds:
    """Of the adapters that clients may have."""
    model = read_hf_model(str(config.model.hf_checkpoint))
    parts = ["attn", "unembed"] if model.transformer.get("num_moe_experts") else ALL
    return AdapterNeeds(config.server.max_adapter_rank, target_modules(parts, model))


def make_sglang_sampler(
    config: RunConfig, layout: ParallelLayout, images: ImageProcessor | None = None
) -> SglangSampler:
    """Start the servers and build the sampler. images: of the base model. Collective; see
    `start_servers`."""
    assert config.model.hf_checkpoint is not None
    model = config.model.hf_checkpoint
    root = Path(config.server.server_dir).resolve()
    timeout_s = config.sglang.update_weight_timeout_s
    unmerged = config.lora.lora_sync == "adapter"
    transport = KeptBaseTransport if unmerged else SnapshotTransport

    def make_updater(pool: ServerPool) -> WeightUpdater:
        return snapshot_updater(pool, model, root, timeout_s, transport)

    pool, updater, agent = start_servers(
        AdapterServers() if unmerged else SglangKind(),
        config,
        make_updater,
        device=device_of_this_process(),
        logs=root / "engines",
    )
    settings = replace(request_settings(config.sglang), images=images)
    check = config.sglang.check_weight_update_equal
    engine = SglangEngine(
        pool,
        updater,
        settings,
        model,
        check_updates=check,
        agent=agent,
        left_out=left_out(config),
        takes_adapter=unmerged,
    )
    adapters = None
    if unmerged and pool is not None:
        adapters = ServedAdapters(
            pool,
            model,
            max_adapters=config.server.max_sampler_adapters,
            timeout_s=timeout_s,
            others=config.sglang.rollout_num_gpus is None,
        )
    return SglangSampler(engine, snapshot_transport(updater), settings, model, adapters)
