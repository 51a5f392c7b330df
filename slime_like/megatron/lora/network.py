"""A frozen base with one trained adapter, of a policy or a critic. Several adapters can share one
`LoraBase`, each with its own optimizer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import ScheduleConfig
from slime_like.megatron.lora.adapter import AdapterChunk
from slime_like.megatron.lora.base import LoraBase
from slime_like.megatron.lora.config import LoraSpec
from slime_like.megatron.lora.targets import HEAD, Target, targets_of
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES
from slime_like.weights.families import head_name
from slime_like.weights.gather import WeightStream
from slime_like.weights.quantized import QuantizedWeight

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


class LoraNetwork(TrainedNetwork):
    """A `TrainedNetwork` with the chunks and modules of the base; only the adapter is trained and
    saved. It is active only within this object's methods."""

    def __init__(
        self,
        base: LoraBase,
        spec: LoraSpec,
        *,
        ddp: DistributedDataParallelConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
    ) -> None:
        """total_steps: optimizer steps of the whole run. Raises ValueError naming target modules
        that the model lacks. The factors are small, so gradient reduction and parameter gathering
        are not overlapped, whatever `ddp` says."""
        self.base = base
        self.spec = spec
        self._exports = {}
        self.value_head = spec.value_head
        self.config = base.config
        self.gpt = base.gpt
        self.layout = base.layout
        self.device = base.device
        self.chunks = base.chunks
        self.modules = base.modules
        tied_head = head_name(base.hf.architecture) if base.tied else None
        self.targets: list[Target] = targets_of(spec, base.family, base.sizes, tied_head=tied_head)
        self.adapters = [
            AdapterChunk(base, index, self.targets, spec) for index in range(len(base.chunks))
        ]
        self._set_up_training(
            self.adapters,
            ddp=dataclasses.replace(ddp, overlap_grad_reduce=False, overlap_param_gather=False),
            optimizer=without_overlap(optimizer),
            schedule=schedule,
            total_steps=total_steps,
        )

    @property
    def saved_chunks(self) -> Sequence[MegatronModule]:
        return self.adapters

    def load_hf(self, folder: str) -> None:
        """Load the base's weights; the adapter is unchanged."""
        self.base.load_hf(folder)

    def freeze(self) -> None:
        raise AssertionError("an adapter is never frozen")

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with self.base.active([adapter.active_layers for adapter in self.adapters]):
            yield

    def export_hf(
        self,
        hf: HfModel,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> WeightStream:
        """Export the merged weights. An adapter on the output layer of a tied model unties it."""
        assert not self.value_head, "a critic is not exported"
        deltas: dict[str, Callable[[], Tensor]] = {}
        for adapter in self.adapters:
            deltas |= {name: layer.delta for name, layer in adapter.layers.items()}
        untied_head = self.base.tied and any(target.parameter == HEAD for target in self.targets)
        export = self.hf_export(hf, dtype, bucket_bytes, quantized, untied_head=untied_head)
        return export.stream(deltas)

    def finalize_gradients(
        self, model: Sequence[object], num_tokens: Tensor | None = None, **others: object
    ) -> None:
        """Replaces megatron-core's: reduce over data-parallel ranks, then sum partial gradients
        over tensor-parallel ranks."""
        assert num_tokens is None, "losses are normalised; see gradient_scale"
        for wrapped in self.trained_modules:
            wrapped.finish_grad_sync()
        partial: dict[dist.ProcessGroup, list[Tensor]] = {}
        for adapter in self.adapters:
            for parameter, group in adapter.partial_gradients():
                gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
                partial.setdefault(group, []).append(gradient)
        for group, gradients in partial.items():
            all_reduce_coalesced(group, gradients)
        reset_model_temporary_tensors(self.config, list(model))


def all_reduce_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """All-reduce the tensors in place, in one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def without_overlap(optimizer: OptimizerConfig) -> OptimizerConfig:
    config = copy.copy(optimizer)
    config.overlap_param_gather = config.overlap_param_gather_with_optimizer_step = False
    return config
