"""Megatron-LM flags that set differently named fields of megatron-core's TransformerConfig."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class MegatronSpellings(CheckedSettings):
    swiglu: bool = arg(False, "Gated linear units with SiLU in the MLP.")
    squared_relu: bool = arg(False, "Squared ReLU in the MLP.")
    quick_geglu: bool = arg(
        False, "Gated linear units with the quick approximation of GELU in the MLP."
    )
    group_query_attention: bool = arg(
        False, "Grouped-query attention, with --num-query-groups groups (1 when that is not given)."
    )
