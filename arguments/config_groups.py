"""The groups of settings of a run, shared by the rules (`Settings`) and `RunConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arguments.eval_sets import EvalSet
from arguments.schema import (
    AgentsConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    DebugConfig,
    DistillationConfig,
    EvalConfig,
    GateConfig,
    GPTModelConfig,
    HooksConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PreflightConfig,
    ProfilingConfig,
    RestatedConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
    SchedulingConfig,
    ServerConfig,
    SglangConfig,
    SlimeConfig,
)
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.value_loss import ValueLossConfig


@dataclass(frozen=True)
class ConfigGroups:
    """All groups of settings. policy_loss: settings of the chosen loss. eval_sets: the evaluation
    sets that `eval` names."""

    model: ModelConfig
    lora: LoraConfig
    gpt: GPTModelConfig
    parallel: ParallelConfig
    data: DataConfig
    eval: EvalConfig
    eval_sets: tuple[EvalSet, ...]
    rollout: RolloutConfig
    scheduling: SchedulingConfig
    agents: AgentsConfig
    hooks: HooksConfig
    sglang: SglangConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    distillation: DistillationConfig
    off_policy: OffPolicyConfig
    policy_loss: Any
    critic: CriticConfig
    value_loss: ValueLossConfig
    gates: GateConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    debug: DebugConfig
    profiling: ProfilingConfig
    preflight: PreflightConfig
    server: ServerConfig
    slime: SlimeConfig
    restated: RestatedConfig
    world_size: int
