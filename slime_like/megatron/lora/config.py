"""What an adapter is, apart from its numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from arguments.schema import LoraConfig
from arguments.schema.lora import TARGETS, UNEMBEDDING


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """targets: last parts of Hugging Face's module names ("q_proj", "lm_head"). seed: of the first
    factors; the second ones start at zero. value_head: of a critic, which has a scalar head of its
    own, trained whole, where the model has its output layer."""

    rank: int
    alpha: float
    targets: frozenset[str]
    seed: int
    value_head: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def describe(self) -> dict[str, int | float | str]:
        """Settings that tell one adapter from another, to say how a checkpoint's differs."""
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_target_modules": " ".join(sorted(self.targets)),
        }


def lora_spec(config: LoraConfig, seed: int) -> LoraSpec:
    targets = frozenset(name for word in config.lora_target_modules for name in TARGETS[word])
    return LoraSpec(config.lora_rank, config.lora_alpha, targets, seed)


def critic_lora_spec(config: LoraConfig, rank: int, seed: int) -> LoraSpec:
    """As the policy's, without the output layer, which a critic does not have."""
    policy = lora_spec(config, seed)
    return dataclasses.replace(
        policy, rank=rank, targets=policy.targets - {*UNEMBEDDING}, value_head=True
    )
