"""torch norms under sequence parallelism.

Target    transformer.torch_norm: WrappedTorchNorm.__new__, the norm of layer specs without
          Transformer Engine.
Why       It rejects `sequence_parallel`, although such a norm only lacks the attribute
          `sequence_parallel` on its parameters, by which megatron-core sums over the
          tensor-parallel ranks the gradients that each rank computes from its part of the sequence.
          On a CPU, torch's RMSNorm is a chain of operations, forward and backward.
Without   `--sequence-parallel` fails, and in a bf16 model the norms have fp32 parameters. RMSNorm
          takes twice as long on a CPU, with bitwise equal results.
When      Always: where Transformer Engine is installed, the layers of --transformer-impl local
          have this norm too. It affects only WrappedTorchNorm.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_patches.packed_ops import PackedRMSNorm
from megatron_patches.patch import ALWAYS, Patch, find

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


NAME = "torch_norm_sp"
TARGET = "transformer.torch_norm:WrappedTorchNorm.__new__"


NORMS: dict[str, type[torch.nn.Module]] = {
    "LayerNorm": torch.nn.LayerNorm,
    "RMSNorm": PackedRMSNorm,
}


def _new(
    cls: type,
    config: TransformerConfig,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """Build the norm `config.normalization` over the last dimension [hidden_size], in
    `config.params_dtype`."""
    if config.normalization not in NORMS:
        raise ValueError(
            f"--normalization {config.normalization}: without Transformer Engine the legal values "
            f"are {', '.join(NORMS)}"
        )
    for flag in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
        if getattr(config, flag):
            raise ValueError(f"{flag} needs Transformer Engine; leave it off")
    norm = NORMS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def check() -> None:
    find(NAME, TARGET)


def install() -> None:
    find(NAME, "transformer.torch_norm:WrappedTorchNorm").__new__ = _new


PATCH = Patch(NAME, ALWAYS, check, install)
