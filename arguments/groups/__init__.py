"""One frozen dataclass for each group of settings. Constructors above this layer take these, never an argparse namespace."""

from arguments.groups.algorithm import AlgorithmConfig, GateConfig
from arguments.groups.checkpoint import CheckpointConfig
from arguments.groups.critic import CriticConfig
from arguments.groups.data import DataConfig, EvalConfig
from arguments.groups.distillation import DistillationConfig
from arguments.groups.logging import DebugConfig, LoggingConfig
from arguments.groups.lora import LoraConfig
from arguments.groups.model import GPTModelConfig, ModelConfig
from arguments.groups.optimizer import ScheduleConfig
from arguments.groups.parallel import ParallelConfig
from arguments.groups.rollout import RewardConfig, RolloutConfig
from arguments.groups.scheduling import SchedulingConfig
from arguments.groups.server import ServerConfig
from arguments.groups.sglang import SglangConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "DistillationConfig",
    "EvalConfig",
    "GPTModelConfig",
    "GateConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "SchedulingConfig",
    "ServerConfig",
    "SglangConfig",
]
