"""torch norms under sequence parallelism.

Target    transformer.torch_norm: WrappedTorchNorm.__new__, the norm of layer specs without Transformer Engine.
Why       It refuses `sequence_parallel`. All that such a norm lacks is the mark `sequence_parallel` on its parameters, by
          which the gradients, each computed from a part of the sequence, are summed over the
          tensor-parallel ranks. It also leaves the parameters in float32 when the model's are bf16.
When      No Transformer Engine.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import NO_TE, Patch, find

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


NAME = "torch_norm_sp"
TARGET = "transformer.torch_norm:WrappedTorchNorm.__new__"
NORMS: dict[str, type[torch.nn.Module]] = {
    "LayerNorm": torch.nn.LayerNorm,
    "RMSNorm": torch.nn.RMSNorm,
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
    """The norm that `config.normalization` names over the last dimension [hidden_size], in the
    parameters' dtype."""
    if config.normalization not in NORMS:
        raise ValueError(
            f"--normalization {config.normalization}: without Transformer Engine the legal values are {', '.join(NORMS)}"
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


PATCH = Patch(NAME, NO_TE, check, install)
