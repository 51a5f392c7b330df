"""Content of checkpoints, and saving and loading them: megatron-core's distributed format for
weights and optimizers, safetensors for random states, JSON for the rest. File layout and
completeness are handled by slime_like/checkpoints/."""

from slime_like.checkpoints.state import read_trainer_state
from slime_like.megatron.checkpoint.load import (
    is_converted,
    load_checkpoint,
    load_weights,
    saved_networks,
)
from slime_like.megatron.checkpoint.networks import SavedNetwork
from slime_like.megatron.checkpoint.save import (
    CheckpointSaver,
    SaveError,
    SavePolicy,
    SaveReport,
)

__all__ = [
    "CheckpointSaver",
    "SaveError",
    "SavePolicy",
    "SaveReport",
    "SavedNetwork",
    "is_converted",
    "load_checkpoint",
    "load_weights",
    "read_trainer_state",
    "saved_networks",
]
