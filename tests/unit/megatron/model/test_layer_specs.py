"""Our layer specs are megatron-core's own, as long as it has them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

import megatron_patches

megatron_patches.apply()

from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)

from slime_like.megatron.model.layer_specs import local_layer  # noqa: E402
from slime_like.megatron.ops.attention import PackedAttention  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def plain(spec: Any) -> Any:
    """What compares equal: partial functions do not."""
    if isinstance(spec, partial):
        return spec.func, plain(spec.keywords)
    if isinstance(spec, dict):
        return {key: plain(value) for key, value in spec.items()}
    if isinstance(spec, tuple):
        return tuple(map(plain, spec))
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return type(spec), {key: plain(value) for key, value in vars(spec).items()}
    return spec


@pytest.mark.parametrize("experts", [None, 4])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_layer(experts: int | None, normed: bool, latent: bool, normalization: str) -> None:
    theirs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **SIZES, qk_layernorm=normed, normalization=normalization, num_moe_experts=experts
    )
    expected = theirs.get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=normed,
        multi_latent_attention=latent,
        normalization=normalization,
    )
    expected.submodules.self_attention.submodules.core_attention = PackedAttention
    found = local_layer(config, PackedAttention, experts=experts is not None)
    assert plain(found) == plain(expected)
