"""Exponential moving average (EMA) of a network's weights: the teacher of self-distillation (SDFT,
arXiv 2601.19897; SDPO, arXiv 2601.20802)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from slime_like.megatron.network import Network
from slime_like.megatron.reshard import copy_same_layout


class AveragedNetwork:
    """EMA: phi <- phi + rate (theta - phi) after each optimizer step of a network in the same
    layout. Half-precision weights are averaged in float32, because a small update would be rounded
    away. rate 0 keeps the initial weights."""

    def __init__(self, network: Network, rate: float) -> None:
        network.freeze()
        self.network = network
        self.rate = rate
        self._wide: dict[Parameter, Tensor] = {}  # float32 averages of half-precision weights

    def start(self, source: Network) -> None:
        """Copy the weights of another network in the same layout, after `finish_updates`."""
        copy_same_layout(source, self.network)
        self._widen()

    @torch.no_grad()
    def update(self, source: Network) -> None:
        """Update after an optimizer step of `source` and its `finish_updates`. Buffers (expert
        biases) are copied."""
        if not self.rate:
            return
        for source_chunk, chunk in zip(source.chunks, self.network.chunks, strict=True):
            current = dict(source_chunk.named_parameters())
            for name, parameter in chunk.named_parameters():
                average = self._wide.get(parameter, parameter)
                average.lerp_(current[name].to(average.dtype), self.rate)
                if average is not parameter:
                    parameter.copy_(average)
            buffers = dict(source_chunk.named_buffers())
            for name, buffer in chunk.named_buffers():
                buffer.copy_(buffers[name])

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Expose the float32 averages while saving or loading a checkpoint."""
        # The parameters keep their identity, which checkpoints and buckets refer to; only their
        # storage is exchanged, and what was loaded into the averages is rounded back at the end.
        narrow = {parameter: parameter.data for parameter in self._wide}
        for parameter, average in self._wide.items():
            parameter.data = average
        try:
            yield
        finally:
            for parameter, data in narrow.items():
                parameter.data = data.copy_(self._wide[parameter])

    def _widen(self) -> None:
        if not self.rate:
            return
        for chunk in self.network.chunks:
            for parameter in chunk.parameters():
                if parameter.dtype.itemsize < 4:
                    self._wide[parameter] = parameter.detach().float()
