"""The specification of an adapter, without its parameters."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from arguments.schema import LoraConfig
from arguments.schema.lora import TARGETS, UNEMBEDDING


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Specification of an adapter."""

    rank: int
    alpha: float
    targets: frozenset[str]  # last components of Hugging Face module names ("q_proj", "lm_head")
    seed: int  # of lora_A; lora_B starts at zero
    # a critic's adapter, which has a fully trained scalar head in place of the output layer
    value_head: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def describe(self) -> dict[str, int | float | str]:
        """Settings that identify an adapter, to report how a checkpoint differs."""
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_target_modules": " ".join(sorted(self.targets)),
        }


def lora_spec(config: LoraConfig, seed: int) -> LoraSpec:
    modules = (TARGETS[name] for name in config.lora_target_modules)
    targets = frozenset(itertools.chain.from_iterable(modules))
    return LoraSpec(config.lora_rank, config.lora_alpha, targets, seed)


def critic_lora_spec(config: LoraConfig, rank: int, seed: int) -> LoraSpec:
    """The policy's specification without the output layer, which a critic does not have."""
    policy = lora_spec(config, seed)
    return dataclasses.replace(
        policy, rank=rank, targets=policy.targets - {*UNEMBEDDING}, value_head=True
    )
