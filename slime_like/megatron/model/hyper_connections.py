"""Layers with several residual streams (ops/hyper_connections.py).

Between layers, and between pipeline stages, hidden states are [T, N, H]: the axis of the batch, of
which packed rows need none, has the streams.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime_like.megatron.model.norms import rms_norm
from slime_like.megatron.model.own_parameters import parameter_device
from slime_like.megatron.ops.hyper_connections import (
    SCALES,
    mean_of_streams,
    number_of_weights,
    read_streams,
    spread,
    sum_of_streams,
    write_streams,
)

INITIAL_STD = 0.02  # of the weights, as in transformers


def streams_of(config: TransformerConfig) -> int:
    """Number of vectors of a token that pipeline stages exchange: residual streams, 1 without
    hyper-connections, or beside the hidden state those with the inputs of layers
    (layer_inputs.py)."""
    inputs = config.num_layers * getattr(config, "layer_input_size", 0)
    return int(getattr(config, "residual_streams", 1) + math.ceil(inputs / config.hidden_size))


class HyperConnection(torch.nn.Module, ABC):
    """The hyper-connection of one block. Its parameters are on every tensor-parallel rank; under
    sequence parallelism a rank has the gradient of its own rows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.streams = config.residual_streams
        self.channels = self.streams * config.hidden_size
        device = parameter_device()
        like = {"dtype": config.params_dtype, "device": device}
        for name, tensor in self.make_parameters(like).items():
            parameter = torch.nn.Parameter(tensor)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    @abstractmethod
    def make_parameters(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """Initial values. like: dtype and device."""

    @abstractmethod
    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """[T, N, H] -> the input of the block [T, 1, H], and what `write` needs."""

    @abstractmethod
    def write(self, streams: Tensor, output: Tensor, *weights: Tensor) -> Tensor:
        """The streams after the block, from those before it and its output [T, 1, H]."""

    def matrix(self, rows: int, columns: int, like: Mapping[str, Any]) -> Tensor:
        """An initial weight, the same on all tensor-parallel ranks."""
        weight = torch.empty(rows, columns, **like)
        return weight.normal_(std=INITIAL_STD) if self.config.perform_initialization else weight


class SinkhornConnection(HyperConnection):
    """A manifold-constrained hyper-connection. Its parameters are those of `read_streams`."""

    weight: Tensor
    base: Tensor
    scale: Tensor

    def make_parameters(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `HyperConnection`."""
        weights = number_of_weights(self.streams)
        return {
            "weight": self.matrix(weights, self.channels, like),
            "base": torch.zeros(weights, **like),
            "scale": torch.ones(SCALES, **like),
        }

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """See `HyperConnection`."""
        return read_streams(
            streams,
            self.weight,
            self.base,
            self.scale,
            norm_epsilon=self.config.layernorm_epsilon,
            epsilon=self.config.sinkhorn_epsilon,
            iterations=self.config.sinkhorn_iterations,
        )

    def write(self, streams: Tensor, output: Tensor, *weights: Tensor) -> Tensor:
        """See `HyperConnection`."""
        writing, mixing = weights
        return write_streams(streams, output, writing, mixing)


class HyperConnectedLayer(TransformerLayer):
    """A layer whose attention and MLP read and write residual streams: [T, N, H] -> [T, N, H]."""

    connection: type[HyperConnection] = SinkhornConnection

    def __init__(self, config: TransformerConfig, *args: object, **settings: object) -> None:
        super().__init__(config, *args, **settings)
        self.self_attention_hyper_connection = self.connection(config)
        self.mlp_hyper_connection = self.connection(config)
        self.self_attn_bda = self.mlp_bda = _without_residual

    def _forward_attention(
        self, hidden_states: Tensor, *args: object, **settings: object
    ) -> tuple[Tensor, Any]:
        connection = self.self_attention_hyper_connection
        block_input, *weights = connection(hidden_states)
        output, context = super()._forward_attention(block_input, *args, **settings)
        return connection.write(hidden_states, output, *weights), context

    def _forward_mlp(self, hidden_states: Tensor, *args: object, **settings: object) -> Tensor:
        connection = self.mlp_hyper_connection
        block_input, *weights = connection(hidden_states)
        output = super()._forward_mlp(block_input, *args, **settings)
        return connection.write(hidden_states, output, *weights)


class StreamsHead(torch.nn.Module):
    """What reads the streams at the end in DeepSeek-V4, [T, N, H] -> [T, 1, H]: a learned sum, and
    the last norm. It has the arguments of megatron-core's norms."""

    weight: Tensor  # of the norm
    sum_weight: Tensor
    sum_base: Tensor
    sum_scale: Tensor
    ends_streams = True

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        streams = config.residual_streams
        device = parameter_device()
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        tensors = {
            "weight": torch.ones(hidden_size, **like),
            "sum_weight": torch.zeros(streams, streams * hidden_size, **like),
            "sum_base": torch.zeros(streams, **like),
            "sum_scale": torch.ones(1, **like),
        }
        if config.perform_initialization:
            tensors["sum_weight"].normal_(std=INITIAL_STD)
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(tensor)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, streams: Tensor) -> Tensor:
        summed = sum_of_streams(
            streams,
            self.sum_weight,
            self.sum_base,
            self.sum_scale,
            norm_epsilon=self.config.layernorm_epsilon,
            epsilon=self.config.sinkhorn_epsilon,
        )
        return rms_norm(summed, self.weight, self.eps)


def _without_residual(
    training: bool, fused: bool
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """In place of megatron-core's bias-dropout-add."""

    def biased(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        term, bias = output
        return F.dropout(term if bias is None else term + bias, dropout, training)

    return biased


def add_streams(chunk: LanguageModule) -> None:
    """Spread embeddings over the streams, and take the mean of the streams at the end, as GLM-5.3
    does, unless they end by what is in place of the last norm: `StreamsHead`, or the mixer of gated
    streams (gated_streams.py)."""
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_spread_embedding)
    if not chunk.post_process:
        return
    if not getattr(chunk.decoder.final_layernorm, "ends_streams", False):
        chunk.decoder.final_layernorm.register_forward_pre_hook(_mean_before_norm)


def _spread_embedding(module: Any, inputs: object, embedded: Tensor) -> Tensor:
    return spread(embedded, module.config.residual_streams)


def _mean_before_norm(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    streams, *rest = inputs
    return mean_of_streams(streams), *rest
