"""One frozen dataclass for each group of settings. Constructors above this layer take these, never
an argparse namespace."""

from arguments.schema.agents import AgentsConfig
from arguments.schema.algorithm import AlgorithmConfig, GuardConfig
from arguments.schema.checkpoint import CheckpointConfig
from arguments.schema.critic import CriticConfig
from arguments.schema.data import DataConfig, EvalConfig
from arguments.schema.distillation import DistillationConfig
from arguments.schema.hooks import HooksConfig
from arguments.schema.judge import JudgeConfig
from arguments.schema.logging import DebugConfig, LoggingConfig
from arguments.schema.lora import LoraConfig
from arguments.schema.model import GPTModelConfig, ModelConfig
from arguments.schema.optimizer import ScheduleConfig
from arguments.schema.parallel import ParallelConfig
from arguments.schema.preflight import PreflightConfig
from arguments.schema.profiling import ProfilingConfig
from arguments.schema.rollout import RewardConfig, RolloutConfig
from arguments.schema.scheduling import SchedulingConfig
from arguments.schema.server import ServerConfig
from arguments.schema.sglang import SglangConfig
from arguments.schema.slime import ModelArgsConfig, SlimeConfig
from arguments.schema.vllm import VllmConfig

__all__ = [
    "AgentsConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "DistillationConfig",
    "EvalConfig",
    "GPTModelConfig",
    "GuardConfig",
    "HooksConfig",
    "JudgeConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelArgsConfig",
    "ModelConfig",
    "ParallelConfig",
    "PreflightConfig",
    "ProfilingConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "SchedulingConfig",
    "ServerConfig",
    "SglangConfig",
    "SlimeConfig",
    "VllmConfig",
]
