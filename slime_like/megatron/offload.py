"""A frozen model without a second resident copy: its weights lie outside the device and take the
policy's place for a forward pass.

Weights are exchanged tensor by tensor, so that one spare tensor is all that the exchange itself
needs. On a GPU they lie in pinned host memory; on the CPU in a file that was unlinked when it was
mapped, which the operating system may write out and which nobody has to remove.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slime_like.megatron.forward_step import ForwardStep
from slime_like.megatron.network import Network
from slime_like.types import MicroBatch, TrainSample


class OffloadedWeights:
    """Weights of the same shape as `host`'s, which computes with them when asked. It has the calls
    of a frozen `Network`."""

    def __init__(self, host: Network, load: Callable[[Network], None]) -> None:
        """load: writes the weights into the network that it is given, which is `host`; that has its
        own weights afterwards."""
        self.gpt = host.gpt
        self._host = host
        self._stored = _outside(list(_weights(host)))
        load(host)
        self._exchange()
        host.weights_changed()

    def evaluate(
        self,
        step: ForwardStep,
        groups: Sequence[Sequence[TrainSample]],
        batches: Sequence[MicroBatch],
    ) -> list[list[Tensor]]:
        """As `Network.evaluate`."""
        with self._in_place():
            return self._host.evaluate(step, groups, batches)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._host.finish_updates()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, stored in zip(_weights(self._host), self._stored, strict=True):
            spare = tensor.clone()
            tensor.copy_(stored)
            stored.copy_(spare)


def _weights(network: Network) -> Iterator[Tensor]:
    for chunk in network.chunks:
        for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
            yield tensor.data


def _outside(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that are not on the device."""
    if tensors and tensors[0].is_cuda:
        return [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t) for t in tensors]
    stored = []
    with tempfile.NamedTemporaryFile(prefix="slime_like_ref_") as file:
        size = max(1, sum(_bytes(t) for t in tensors))
        file.truncate(size)
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        stored.append(mapped[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        start += _bytes(tensor)
    return stored


def _bytes(tensor: Tensor) -> int:
    """Rounded up to a line of the cache, which also aligns every type."""
    size = tensor.numel() * tensor.element_size()
    return size + -size % 64
