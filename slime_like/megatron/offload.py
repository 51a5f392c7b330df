"""Offloading networks to host memory: a frozen model that is swapped with the policy's weights for
a forward pass, so that no second copy is resident; and trained networks that wait for their turn.

Weights of a frozen model are swapped tensor by tensor, which needs only one spare tensor. With a
GPU they are in pinned host memory; on the CPU in a memory-mapped file that is unlinked at once, so
that the operating system can page it out and nothing has to be removed.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_like.megatron.forward_step import TokenComputation
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.network import Network, PassOutput
from slime_like.megatron.optimizer import group_steps, set_group_steps
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.types import TrainSample

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


class OffloadedWeights:
    """Offloaded weights with the shapes of `host`'s; `forward` swaps them in. The interface is that
    of a frozen `Network`."""

    def __init__(self, host: Network, load: Callable[[Network], None]) -> None:
        """load: loads the weights into `host`, which gets its own weights back afterwards."""
        self.gpt = host.gpt
        self._host = host
        self._stored = _copy_to_host(list(_weights(host)))
        load(host)
        self._swap()
        host.weights_changed()

    @property
    def chunks(self) -> Sequence[MegatronModule]:
        """The host's chunks; they have these weights only within `forward`."""
        return self._host.chunks

    def forward(
        self, samples: Sequence[TrainSample], compute: TokenComputation, size: MicroBatchSize
    ) -> PassOutput:
        """As `Network.forward`."""
        with self._swapped_in():
            return self._host.forward(samples, compute, size)

    @contextmanager
    def _swapped_in(self) -> Iterator[None]:
        self._host.finish_updates()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, stored in zip(_weights(self._host), self._stored, strict=True):
            spare = tensor.clone()
            tensor.copy_(stored)
            stored.copy_(spare)


def _weights(network: Network) -> Iterator[Tensor]:
    for chunk in network.chunks:
        for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
            yield tensor.data


def _copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    if tensors and tensors[0].is_cuda:
        return [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t) for t in tensors]
    stored = []
    with tempfile.NamedTemporaryFile(prefix="slime_like_ref_") as file:
        size = max(1, sum(_aligned_bytes(t) for t in tensors))
        file.truncate(size)
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        stored.append(mapped[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        start += _aligned_bytes(tensor)
    return stored


def _aligned_bytes(tensor: Tensor) -> int:
    """Size in bytes, rounded up to a cache line, which aligns every dtype."""
    return tensor.nbytes + -tensor.nbytes % 64


class OffloadedNetwork:
    """A network that is offloaded to host memory and unusable until `restore`. On the CPU, storage
    shared with numpy (after writing a checkpoint) cannot be freed and stays."""

    def __init__(
        self, network: TrainedNetwork, spare: dict[int, list[Tensor]] | None = None
    ) -> None:
        """spare: reusable host buffers by size."""
        network.finish_updates()
        self._stored: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._spare = spare
        for storage in storages_of(network):
            if torch.cuda.is_available() and storage.device.type == "cpu":
                continue  # shared with an optimizer that is not offloaded
            if not storage.resizable():
                assert storage.device.type == "cpu"
                continue
            reusable = None if spare is None else spare.get(storage.nbytes())
            copy = reusable.pop() if reusable else _host_memory(storage)
            self._stored.append((storage, copy.copy_(bytes_of(storage))))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.nbytes = sum(copy.numel() for _, copy in self._stored)  # freed
        for storage, _ in self._stored:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy everything back to where it was."""
        for storage, copy in self._stored:
            storage.resize_(copy.numel())
            bytes_of(storage).copy_(copy)
            if self._spare is not None:
                self._spare.setdefault(copy.numel(), []).append(copy)
        self._stored = []


class TrainerMemory:
    """Offloads networks while servers on the same GPUs generate. The host buffers are kept, since
    pinning them takes longer than the copies."""

    def __init__(self, networks: Sequence[TrainedNetwork]) -> None:
        self._networks = networks
        self._spare: dict[int, list[Tensor]] = {}
        self._offloaded: list[OffloadedNetwork] = []

    def release(self) -> int:
        """Offload the networks; returns the bytes freed on this rank's device."""
        if not self._offloaded:
            self._offloaded = [OffloadedNetwork(network, self._spare) for network in self._networks]
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # make the memory available to other processes
        return sum(network.nbytes for network in self._offloaded)

    def restore(self) -> None:
        """Copy everything back to where it was; no-op if nothing is offloaded."""
        for network in self._offloaded:
            network.restore()
        self._offloaded = []


def _host_memory(storage: torch.UntypedStorage) -> Tensor:
    is_on_gpu = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_on_gpu)


def storages_of(network: TrainedNetwork) -> list[torch.UntypedStorage]:
    """Storages of all state of the network; see `TrainedNetwork.tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in network.tensors()}
    return [storage for storage in storages.values() if storage.nbytes()]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StoredState:
    """A network's tensors in host memory, outside the network."""

    def __init__(self, network: TrainedNetwork) -> None:
        network.finish_updates()
        self._gradients = network.gradients
        self._group_steps = group_steps(network.optimizer)
        on_device = torch.cuda.is_available()
        self._stored = [
            torch.empty_like(t, device="cpu", pin_memory=on_device).copy_(t)
            for t in network.tensors()
        ]

    @torch.no_grad()
    def restore(self, network: TrainedNetwork) -> None:
        """Write the tensors into a network of the same shape."""
        for tensor, stored in zip(network.tensors(), self._stored, strict=True):
            tensor.copy_(stored)
        network.gradients = self._gradients
        set_group_steps(network.optimizer, self._group_steps)
