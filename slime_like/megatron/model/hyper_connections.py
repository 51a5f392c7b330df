"""Layers with several residual streams (ops/hyper_connections.py).

Between layers, and between pipeline stages, hidden states are [T, N, H]: the axis of the batch, of
which packed rows need none, has the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime_like.megatron.ops.hyper_connections import (
    SCALES,
    mean_of_streams,
    number_of_weights,
    read_streams,
    spread,
    write_streams,
)

INITIAL_STD = 0.02  # of the weights, as in transformers


def streams_of(config: TransformerConfig) -> int:
    """Number of residual streams, 1 without hyper-connections."""
    return int(getattr(config, "residual_streams", 1))


class HyperConnection(torch.nn.Module):
    """The hyper-connection of one block. Its parameters are on every tensor-parallel rank; under
    sequence parallelism a rank has the gradient of its own rows."""

    weight: Tensor
    base: Tensor
    scale: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        streams = config.residual_streams
        weights = number_of_weights(streams)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        like = {"dtype": config.params_dtype, "device": device}
        weight = torch.empty(weights, streams * config.hidden_size, **like)
        if config.perform_initialization:
            weight.normal_(std=INITIAL_STD)
        for name, tensor in {
            "weight": weight,
            "base": torch.zeros(weights, **like),
            "scale": torch.ones(SCALES, **like),
        }.items():
            parameter = torch.nn.Parameter(tensor)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `read_streams`."""
        return read_streams(
            streams,
            self.weight,
            self.base,
            self.scale,
            norm_epsilon=self.config.layernorm_epsilon,
            epsilon=self.config.sinkhorn_epsilon,
            iterations=self.config.sinkhorn_iterations,
        )


class HyperConnectedLayer(TransformerLayer):
    """A layer whose attention and MLP read and write residual streams: [T, N, H] -> [T, N, H]."""

    def __init__(self, config: TransformerConfig, *args: object, **settings: object) -> None:
        super().__init__(config, *args, **settings)
        self.self_attention_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)
        self.self_attn_bda = self.mlp_bda = _without_residual

    def _forward_attention(
        self, hidden_states: Tensor, *args: object, **settings: object
    ) -> tuple[Tensor, Any]:
        block_input, writing, mixing = self.self_attention_hyper_connection(hidden_states)
        output, context = super()._forward_attention(block_input, *args, **settings)
        return write_streams(hidden_states, output, writing, mixing), context

    def _forward_mlp(self, hidden_states: Tensor, *args: object, **settings: object) -> Tensor:
        block_input, writing, mixing = self.mlp_hyper_connection(hidden_states)
        output = super()._forward_mlp(block_input, *args, **settings)
        return write_streams(hidden_states, output, writing, mixing)


def _without_residual(
    training: bool, fused: bool
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """In place of megatron-core's bias-dropout-add."""

    def biased(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        term, bias = output
        return F.dropout(term if bias is None else term + bias, dropout, training)

    return biased


def use_hyper_connections(layer: ModuleSpec) -> None:
    """Replace the residual connections in a layer spec."""
    layer.module = HyperConnectedLayer


def add_streams(chunk: LanguageModule) -> None:
    """Spread embeddings over the streams, and take the mean of the streams at the end, as GLM-5.3
    does."""
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_spread_embedding)
    if chunk.post_process:
        chunk.decoder.final_layernorm.register_forward_pre_hook(_mean_before_norm)


def _spread_embedding(module: Any, inputs: object, embedded: Tensor) -> Tensor:
    return spread(embedded, module.config.residual_streams)


def _mean_before_norm(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    streams, *rest = inputs
    return mean_of_streams(streams), *rest
