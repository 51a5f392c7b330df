"""The network of a conversion: the trainer's `Network` without memory, whose parameters are read
and written one at a time, so that a conversion needs only memory for a few of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from arguments.hf.model import HfModel
from arguments.megatron import merge_network
from arguments.megatron_configs import Machine, build_megatron_configs
from arguments.schema import GPTModelConfig, ModelConfig, ParallelConfig
from slime_like.config import ConfigError
from slime_like.images.settings import VisionSettings
from slime_like.megatron.checkpoint.networks import (
    SavedNetwork,
    adapt_names,
    shape_problems,
    sharded_state,
    sharded_tensors,
)
from slime_like.megatron.model.gpt import model_shape
from slime_like.megatron.model.meta import OnMeta
from slime_like.megatron.model.policy import keep_float32_buffers
from slime_like.megatron.network import Network
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.hf_import import HfWeights, open_hf_weights
from slime_like.weights.parameter_map import global_parameters, named_weights
from slime_like.weights.untrained import with_trained_tower

TIMEOUT_MINUTES = 24 * 60.0  # a rank may keep writing long after the others are done
NO_ACCELERATOR = Machine(cuda=False, transformer_engine=False, gradient_fusion=False)
Advance = Callable[[int], None]  # called with the bytes of every converted tensor


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion, summed over ranks."""

    folder: Path
    bytes: int
    files: int
    kept: int  # complete files reused from an interrupted conversion


def conversion_layout(
    hf: HfModel,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
) -> ParallelConfig:
    """The layout in which a model is converted; by default a single rank, in every process
    separately."""
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        # required by megatron-core; weights do not depend on it
        sequence_parallel=tensor > 1 and bool(hf.transformer.get("num_moe_experts")),
        distributed_backend="gloo",
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )


class MetaNetwork(Network):
    """A network on the meta device."""

    def __init__(
        self,
        hf: HfModel,
        parallel: ParallelConfig,
        layout: ParallelLayout,
        dtype: torch.dtype = torch.float32,
        *,
        value_head: bool = False,
        mtp_layers: int | None = None,
        vision: VisionSettings | None = None,
    ) -> None:
        """
        Args:
            mtp_layers: Number of multi-token prediction layers.
            vision: The vision tower, if it is converted.

        Raises:
            ConfigError: megatron-core's objections to the model in this layout.
        """
        built, problems = build_megatron_configs(
            merge_network({"perform_initialization": False}, hf.transformer, {}),
            model=ModelConfig(transformer_impl="local"),
            parallel=parallel,
            virtual_stages=None,
            machine=NO_ACCELERATOR,
        )
        if built is None:
            raise ConfigError(problems)
        gpt = GPTModelConfig(**hf.gpt, mtp_num_layers=mtp_layers, vision=vision)
        with OnMeta():
            super().__init__(built.transformer, gpt, "local", layout, value_head=value_head)
        self.hf = hf if vision is None else with_trained_tower(hf, vision)
        for chunk in self.chunks:
            with keep_float32_buffers(chunk):
                chunk.to(dtype)  # of any kind, while training knows float32 and bfloat16
        saved = SavedNetwork(self.chunks, None, None, layout)
        self.state = sharded_state(saved, is_loading=False)  # as used for checkpoints
        # by canonical name, on the meta device; without the copy of a tied embedding
        self.parameters: dict[str, Tensor] = {}
        self._entries: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        for index, chunk in enumerate(self.chunks):
            entries = self.state[f"model{index}"]
            names = zip(named_weights(chunk), global_parameters([chunk]), strict=True)
            for (own, _), (name, parameter) in names:
                if own in entries:  # the last stage's copy of a tied embedding is not saved
                    self.parameters[name] = parameter
                    self._entries[name] = entries[own]

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def shape(self) -> dict[str, object]:
        """Settings that distinguish one model from another."""
        return model_shape(self.config, self.gpt)

    def shards(self, name: str, data: Tensor | None = None) -> list[ShardedTensor]:
        """The shards of a parameter in a checkpoint: one tensor, or several (gate and up
        projection).

        Args:
            data: The tensor that they are views of; None: the meta parameter.
        """
        entry = self._entries[name]
        if data is not None:  # of any dtype; a factory takes the dtype of its data
            dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
            entry = dataclasses.replace(entry, data=data, **dtype)
        return list(sharded_tensors({"parameter": entry}))

    def open_hf(self, folder: str) -> HfWeights:
        """This rank's parameters in a Hugging Face folder, as `load_hf` would load them."""
        return open_hf_weights(
            folder,
            self.parameters,
            self.config,
            hf=self.hf,
            gpt=self.gpt,
            layout=self.layout,
            value_head=self.value_head,
        )

    def adapt_to(self, saved: Mapping[str, object]) -> list[str]:
        """Take over the names and dtypes of a checkpoint's tensors.

        Args:
            saved: Their storage metadata by name.

        Returns:
            Descriptions of missing ones and of other shapes.
        """
        adapt_names(self.state, saved)
        if problems := shape_problems(self.state, saved):
            return problems
        for name, parameter in self.parameters.items():
            entry = saved[self.shards(name)[0].key]
            assert isinstance(entry, TensorStorageMetadata), "checked above"
            parameter.data = parameter.data.to(entry.properties.dtype)
        return []

    @property
    def keys(self) -> set[str]:
        """Names of the network's tensors in a checkpoint."""
        return {tensor.key for tensor in sharded_tensors(self.state)}
