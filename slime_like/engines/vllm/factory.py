"""Build the vLLM engine from the run's configuration: find or start servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from arguments.run_config import RunConfig
from arguments.sglang_install import interpreter
from slime_like.engines.registry import EngineContext
from slime_like.engines.serving_factory import (
    ServerKind,
    request_settings,
    start_servers,
    update_settings,
)
from slime_like.engines.vllm.engine import VllmEngine
from slime_like.errors import RunError
from slime_like.servers.launches import ServerProgram, Slot
from slime_like.servers.server_pool import ServerPool
from slime_like.vllm.api import VllmApi
from slime_like.vllm.launch import (
    ADAPTER_VARIABLES,
    SERVER_VARIABLES,
    cpu_variables,
    server_command,
)
from slime_like.vllm.server_check import Needs, check_server
from slime_like.weight_sync.updater import WeightUpdater


def make_vllm_engine(context: EngineContext) -> VllmEngine:
    """Build the engine. Collective; see `start_servers`. Server logs are in the run's folder under
    engines, on the server's node."""
    config = context.config
    assert config.model.hf_checkpoint is not None
    model = config.model.hf_checkpoint
    settings = update_settings(config)
    pool, updater, agent = start_servers(
        VllmKind(),
        config,
        lambda pool: WeightUpdater(pool, settings, model, context.device),
        device=context.device,
        logs=context.output_dir / "engines",
    )
    return VllmEngine(
        pool,
        updater,
        request_settings(config.sglang),
        model,
        check_updates=config.sglang.check_weight_update_equal,
        agent=agent,
        takes_adapter=config.sends_adapter,
    )


@dataclass(frozen=True, slots=True)
class VllmProgram(ServerProgram):
    python: str
    model: str  # --hf-checkpoint
    dtype: str  # e.g. bfloat16
    cuda: bool
    overrides: Mapping[str, object] = field(default_factory=dict)  # the user's --vllm flags
    lora_rank: int = 0  # of adapters that servers get

    def command(self, slot: Slot) -> tuple[str, ...]:
        if slot.nodes > 1:
            raise RunError(
                f"--rollout-num-gpus-per-engine {slot.gpus}: a vLLM server must fit one node"
            )
        return server_command(
            self.python,
            model=self.model,
            host=slot.host,
            port=slot.port,
            gpus=slot.gpus,
            dtype=self.dtype,
            cuda=self.cuda,
            overrides=self.overrides,
            lora_rank=self.lora_rank,
        )

    def environment(self, slot: Slot) -> Mapping[str, str]:
        variables = {**SERVER_VARIABLES, **(ADAPTER_VARIABLES if self.lora_rank else {})}
        if not self.cuda:
            return cpu_variables(os.environ) | variables
        gpus = range(slot.first_gpu, slot.first_gpu + slot.gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        chosen = [str(gpu) if names is None else names[gpu] for gpu in gpus]
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)} | variables


class VllmKind(ServerKind):
    api = VllmApi()

    def program(self, config: RunConfig, device: torch.device) -> VllmProgram:
        assert config.model.hf_checkpoint is not None, "checked on the command line"
        return VllmProgram(
            interpreter(config.vllm.vllm_python),
            config.model.hf_checkpoint,
            dtype_of(config),
            device.type == "cuda",
            config.vllm.vllm_server_flags or {},
            sent_rank(config),
        )

    def check(self, config: RunConfig, pool: ServerPool) -> None:
        length = (config.data.rollout_max_prompt_len or 1) + config.rollout.rollout_max_response_len
        for worker in pool.alive():
            check_server(pool, worker, Needs(dtype_of(config), length, sent_rank(config)))


def sent_rank(config: RunConfig) -> int:
    """Rank of the adapters that servers get; 0 if they get whole weights."""
    return config.lora.lora_rank if config.sends_adapter else 0


def dtype_of(config: RunConfig) -> str:
    return str(config.megatron.transformer.params_dtype).removeprefix("torch.")
