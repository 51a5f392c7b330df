"""Latent attention under tensor parallelism: the gradient of the rotated keys, which all heads
share.

Target    transformer.multi_latent_attention: MLASelfAttention.__init__, after which the down-projection of keys and values of the
          local layers (a ColumnParallelLinear) gives its whole output.
Why       Each rank holds a part of the columns of that projection. `get_query_key_value_tensors` gathers them, and the backward pass of
          that gather takes the rank's slice of a gradient that it takes to be whole. Of the
          compressed part it is: the up-projection sums it over the ranks. The rotated part goes to
          the heads as it is, and a rank has the gradient of its own heads only. The weights'
          gradient, and that of the hidden states, miss those of the other ranks' heads.
How       A forward hook hands out what `get_query_key_value_tensors` expects of a projection that is not cut (as Transformer Engine's):
          all columns, under sequence parallelism of the rank's rows. It then gathers the rotated
          part over the rows itself, whose backward pass sums. Without sequence parallelism the hook
          makes that sum.
When      Always; it acts on megatron-core's local layers only. Transformer Engine's are not cut.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import ALWAYS, Patch, find, missing

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig


NAME = "mla_tp_grads"
MODULE = "transformer.multi_latent_attention"
CLASS = f"{MODULE}:MLASelfAttention"
USED = (
    "kv_lora_rank",
    "gather_from_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
)


def check() -> None:
    find(NAME, f"{CLASS}.__init__")
    names = find(NAME, f"{CLASS}.get_query_key_value_tensors").__code__.co_names
    for name in USED:
        if name not in names:
            raise missing(
                NAME, f"megatron.core.{CLASS}.get_query_key_value_tensors no longer uses {name}"
            )


def install() -> None:
    cls = find(NAME, CLASS)
    column_parallel = find(NAME, f"{MODULE}:ColumnParallelLinear")
    was = cls.__init__

    @functools.wraps(was)
    def init(self: MLASelfAttention, *args: object, **kwargs: object) -> None:
        was(self, *args, **kwargs)
        if isinstance(self.linear_kv_down_proj, column_parallel) and self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(
                functools.partial(_whole, self.config, self.tp_group)
            )

    cls.__init__ = init


def _whole(
    config: MLATransformerConfig,
    group: dist.ProcessGroup,
    module: object,
    inputs: object,
    output: tuple[torch.Tensor, object],
) -> tuple[torch.Tensor, object]:
    """output: [s, b, (kv_lora_rank + qk_pos_emb_head_dim) / tp] -> all columns, [s, b, ...], or [s
    / tp, b, ...] under sequence parallelism."""
    from megatron.core.tensor_parallel import mappings

    columns, bias = output
    whole = mappings.gather_from_tensor_model_parallel_region(columns, group=group)
    if config.sequence_parallel:
        return mappings.scatter_to_sequence_parallel_region(whole, group=group), bias
    latents, rotated = whole.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    rotated = mappings.copy_to_tensor_model_parallel_region(rotated, group=group)
    return torch.cat([latents, rotated], dim=-1), bias


PATCH = Patch(NAME, ALWAYS, check, install)
