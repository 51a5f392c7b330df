"""The rules about parallel sizes by themselves, for programs that cut a network and do not train
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.rules.moe import expert_parallel_sizes
from arguments.rules.parallel import (
    pipeline_divides_the_layers,
    tensor_parallel_divides_the_network,
    world_is_divisible,
)
from arguments.schema import ParallelConfig
from slime_like.config import Problem, check_fields

RULES = (
    world_is_divisible,
    tensor_parallel_divides_the_network,
    pipeline_divides_the_layers,
    expert_parallel_sizes,
)


@dataclass(frozen=True, slots=True)
class CutNetwork:
    """core: megatron-core's fields of the network."""

    parallel: ParallelConfig
    core: Mapping[str, Any]
    world_size: int


def layout_problems(cut: CutNetwork) -> list[Problem]:
    """What is wrong with the sizes on their own; else with the network, and with the number of
    processes."""
    return check_fields(cut.parallel) or [found for rule in RULES for found in rule(cut)]
