"""Packed attention with torch's flash attention: `torch.nn.attention.varlen` takes the sequence
boundaries, so sequences are neither padded nor computed separately.

Its limits in torch 2.11 to 2.13: bf16 or fp16, a GPU of compute capability 8.0 or newer, head
dimensions that are equal for keys and values and a multiple of 8 up to 256, no dropout, no
attention sinks. Grouped-query attention is supported. `why_not_varlen` decides whether it is used.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from slime_like.megatron.ops.attention import PackedAttention, PackedRows

logger = logging.getLogger(__name__)

CAUSAL = (-1, 0)  # window of a query: tokens before and after its own; -1: all
MAX_HEAD_DIM = 256
# consumer GPUs have too little shared memory for the backward pass of wider heads
SMALL_CHIPS = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
MAX_HEAD_DIM_SMALL = 192
# torch 2.11 supports grouped-query attention without this parameter
SHARED_KEYS: dict[str, object] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class VarlenAttention(PackedAttention):
    """`PackedAttention` with torch's flash attention, used if `why_not_varlen` returns None."""

    attend: Callable[..., Tensor | tuple[Tensor, Tensor]] = staticmethod(varlen_attn)

    def forward(
        self,
        query: Tensor,  # (T, heads, d)
        key: Tensor,  # (T, groups, d)
        value: Tensor,  # (T, groups, d)
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # (T, heads * d)
        rows = packed_seq_params
        assert isinstance(rows, PackedRows) and rows.context is None
        assert attention_bias is None and attention_mask is None, "packed rows carry no mask tensor"
        longest = max(rows.lengths)
        out = self.attend(
            query,
            key,
            value,
            rows.cu_seqlens_q,
            rows.cu_seqlens_kv,
            longest,
            longest,
            scale=self.softmax_scale,
            window_size=CAUSAL,
            **(SHARED_KEYS if query.size(1) != key.size(1) else {}),
        )
        assert isinstance(out, Tensor)
        return out.reshape(out.size(0), -1)


def packed_attention(config: TransformerConfig) -> type[PackedAttention]:
    """Choose the core attention for packed sequences on this process's GPU; logged once."""
    reason = why_not_varlen(config, flash_capability())
    _log(reason)
    return VarlenAttention if reason is None else PackedAttention


def why_not_varlen(config: TransformerConfig, capability: tuple[int, int] | None) -> str | None:
    """Why `varlen_attn` cannot compute this model's attention; None if it can.

    Args:
        config: megatron-core's TransformerConfig. Windows and sinks are not checked: such models
            use `WindowAttention`.
        capability: Compute capability of the GPU; None if torch has no flash attention for it.
    """
    width = config.kv_channels
    if capability is None:
        return "this torch has no flash attention for the device"
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and this GPU has {'.'.join(map(str, capability))}"
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return f"it supports bf16 and fp16, and the model is in {str(config.params_dtype)[6:]}"
    if config.context_parallel_size > 1:
        return "context parallelism gathers keys and values"
    if config.multi_latent_attention:
        return "latent attention has keys longer than its values"
    if config.attention_dropout:
        return f"it has no dropout (--attention-dropout {config.attention_dropout})"
    limit = MAX_HEAD_DIM_SMALL if capability in SMALL_CHIPS else MAX_HEAD_DIM
    if width % 8 or width > limit:
        return f"it supports head sizes that are multiples of 8 up to {limit}, not {width}"
    return None


def flash_capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU; None if there is none or torch has no flash attention
    for it."""
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return None
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@functools.cache
def _log(reason: str | None) -> None:
    if reason is None:
        logger.info(
            "attention of packed rows: flash attention of torch %s (torch.nn.attention.varlen)",
            torch.__version__,
        )
    else:
        logger.info(
            "attention of packed rows: scaled_dot_product_attention, sequence by sequence or in "
            "padded batches, not torch.nn.attention.varlen: %s",
            reason,
        )
