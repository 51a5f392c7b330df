"""Starts SGLang servers that sample for the Tinker server."""

from __future__ import annotations

from pathlib import Path

from arguments.run_config import RunConfig
from slime_like.engines.serving_factory import request_settings, start_servers
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import SglangKind
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.servers.server_pool import ServerPool
from slime_like.tinker.sglang_sampler import SglangSampler, snapshot_transport, snapshot_updater
from slime_like.weight_sync.updater import WeightUpdater


def make_sglang_sampler(config: RunConfig, layout: ParallelLayout) -> SglangSampler:
    """Start the servers and build the sampler. Collective; see `start_servers`."""
    assert config.model.hf_checkpoint is not None
    model = config.model.hf_checkpoint
    root = Path(config.server.server_dir).resolve()

    def make_updater(pool: ServerPool) -> WeightUpdater:
        return snapshot_updater(pool, model, root, config.sglang.update_weight_timeout_s)

    pool, updater, agent = start_servers(
        SglangKind(), config, make_updater, device=device_of_this_process(), logs=root / "engines"
    )
    settings = request_settings(config.sglang)
    check = config.sglang.check_weight_update_equal
    engine = SglangEngine(pool, updater, settings, model, check_updates=check, agent=agent)
    return SglangSampler(engine, snapshot_transport(updater), settings, model)
