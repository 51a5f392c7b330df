"""Multi-latent attention under tensor parallelism: the gradient of the rotary part of the keys,
which all heads share.

Target    transformer.multi_latent_attention: MLASelfAttention.__init__, which gets a hook on the
          key/value down-projection of the local layers (a ColumnParallelLinear).
Why       Each rank holds some columns of that projection. `get_query_key_value_tensors` gathers
          them, and the backward pass of that gather assumes the full gradient and takes the rank's
          slice. This is right for the compressed part, whose gradient the up-projection sums over
          the ranks. The rotary part goes directly to the heads, so a rank only has the gradient
          from its own heads.
Without   The gradients of these weights and of the hidden states silently lack the contribution of
          the other ranks' heads.
How       The hook returns what `get_query_key_value_tensors` expects of an unsharded projection (as
          Transformer Engine's): all columns, and under sequence parallelism this rank's rows. The
          method then gathers the rotary part over the rows itself, and the backward pass of that
          gather sums. Without sequence parallelism the hook adds the sum.
When      Always. It affects only megatron-core's local layers; Transformer Engine's projection is
          not sharded.
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
    target = f"{CLASS}.get_query_key_value_tensors"
    names = find(NAME, target).__code__.co_names
    for name in USED:
        if name not in names:
            raise missing(NAME, f"megatron.core.{target} no longer uses {name}")


def install() -> None:
    cls = find(NAME, CLASS)
    column_parallel = find(NAME, f"{MODULE}:ColumnParallelLinear")
    original = cls.__init__

    @functools.wraps(original)
    def init(self: MLASelfAttention, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if isinstance(self.linear_kv_down_proj, column_parallel) and self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(
                functools.partial(_gather_columns, self.config, self.tp_group)
            )

    cls.__init__ = init


def _gather_columns(
    config: MLATransformerConfig,
    group: dist.ProcessGroup,
    module: object,
    inputs: object,
    output: tuple[torch.Tensor, object],
) -> tuple[torch.Tensor, object]:
    """Forward hook of the down-projection: gather its output [s, b, (kv_lora_rank +
    qk_pos_emb_head_dim) / tp] to all columns, [s, b, ...] or, under sequence parallelism,
    [s / tp, b, ...]."""
    from megatron.core.tensor_parallel import mappings

    columns, bias = output
    full = mappings.gather_from_tensor_model_parallel_region(columns, group=group)
    if config.sequence_parallel:
        return mappings.scatter_to_sequence_parallel_region(full, group=group), bias
    latents, rotated = full.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    rotated = mappings.copy_to_tensor_model_parallel_region(rotated, group=group)
    return torch.cat([latents, rotated], dim=-1), bias


PATCH = Patch(NAME, ALWAYS, check, install)
