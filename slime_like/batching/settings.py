"""Settings of batch building."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.schema import AlgorithmConfig, DistillationConfig
from slime_like.advantages import AdvantageSettings
from slime_like.batching.outcomes import OutcomeReader
from slime_like.batching.user_hooks import TrainHooks
from slime_like.images.processor import ImageProcessor
from slime_like.losses.off_policy_config import OffPolicyConfig

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of batch building."""

    algorithm: AlgorithmConfig
    off_policy: OffPolicyConfig | None  # None without correction
    transformer: TransformerConfig  # the policy's
    vocab_size: int
    replayed: Collection[str]  # the engine's choices to replay, see `RunConfig.replayed`
    distillation: DistillationConfig
    advantages: AdvantageSettings
    sample_buffer_size: int
    old_is_current: bool  # see `TrainBatch`
    outcome_readers: Sequence[OutcomeReader]  # see `outcome_readers` in factory.py
    hooks: TrainHooks
    image_processor: ImageProcessor | None = None  # of samples with images
