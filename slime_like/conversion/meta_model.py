"""A model on the meta device: names and shapes of this rank's parameters, and of their shards in a
distributed checkpoint.

Conversion processes one parameter at a time, so it only needs memory for a few parameters,
regardless of the model's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from arguments.hf.model import HfModel
from arguments.megatron import merge_network
from arguments.megatron_configs import Machine, build_megatron_configs
from arguments.schema import GPTModelConfig, ModelConfig, ParallelConfig
from slime_like.config import ConfigError
from slime_like.megatron.checkpoint.networks import SavedNetwork, sharded_state
from slime_like.megatron.model.gpt import build_chunks, model_shape
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.hf_import import LoadPlan, plan_loading
from slime_like.weights.parameter_map import global_parameters, named_weights
from slime_like.weights.safetensors_reader import WeightFiles

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.module import MegatronModule


TIMEOUT_MINUTES = 24 * 60.0  # a rank may keep writing long after the others are done
NO_ACCELERATOR = Machine(cuda=False, transformer_engine=False, gradient_fusion=False)


@dataclass(frozen=True)
class MetaModel:
    """This rank's model on the meta device."""

    hf: HfModel
    gpt: GPTModelConfig
    layout: ParallelLayout
    value_head: bool
    chunks: list[MegatronModule]  # its GPTModels
    state: ShardedStateDict  # their sharded state dict, as used for checkpoints
    parameters: dict[str, Tensor]  # canonical name -> meta parameter
    _entries: dict[str, ShardedTensor | ShardedTensorFactory]

    def pieces(self, name: str, data: Tensor | None = None) -> list[ShardedTensor]:
        """The shards of a parameter in a checkpoint: one tensor, or several (gate and up
        projection). data: the tensor that they are views of; None: the meta parameter."""
        entry = self._entries[name]
        if data is not None:  # of any dtype; a factory takes the dtype of its data
            dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
            entry = dataclasses.replace(entry, data=data, **dtype)
        return list(_built(entry))

    def plan_loading(self, files: WeightFiles, folder: str) -> LoadPlan:
        """Plan the loading of this rank's shards from a Hugging Face folder."""
        return plan_loading(
            self.parameters,
            files,
            folder,
            self.chunks[0],
            hf=self.hf,
            gpt=self.gpt,
            layout=self.layout,
            value_head=self.value_head,
        )

    def shape(self) -> dict[str, object]:
        """Settings that distinguish one model from another."""
        return model_shape(self.chunks[0].config, self.gpt)


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


def build_meta_model(
    hf: HfModel,
    parallel: ParallelConfig,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    value_head: bool,
    mtp_layers: int | None = None,
) -> MetaModel:
    """Build the model on the meta device. mtp_layers: number of multi-token prediction layers.
    Raises ConfigError with megatron-core's objections to the model in this layout."""
    core = merge_network({"perform_initialization": False}, hf.transformer, {})
    built, problems = build_megatron_configs(
        core,
        model=ModelConfig(transformer_impl="local"),
        parallel=parallel,
        virtual_stages=None,
        machine=NO_ACCELERATOR,
    )
    if built is None:
        raise ConfigError(problems)
    gpt = GPTModelConfig(**hf.gpt, mtp_num_layers=mtp_layers)
    with OnMeta():
        chunks = build_chunks(built.transformer, gpt, "local", layout, value_head=value_head)
        chunks = [chunk.to(dtype) for chunk in chunks]
    state = sharded_state(SavedNetwork(chunks, None, None, layout), is_loading=False)
    parameters = {}
    entries = {}
    for index, chunk in enumerate(chunks):
        for (own, _), (name, parameter) in zip(
            named_weights(chunk), global_parameters([chunk]), strict=True
        ):
            # the last stage's copy of a tied embedding is not saved
            if own in state[f"model{index}"]:
                parameters[name], entries[name] = parameter, state[f"model{index}"][own]
    return MetaModel(hf, gpt, layout, value_head, chunks, state, parameters, entries)


class OnMeta(TorchFunctionMode):
    """Creates all new tensors on the meta device, whatever device was requested."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.arange, torch.tensor, torch.full):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _built(entry: object) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, ShardedTensor):
        yield entry
    elif isinstance(entry, dict | list):
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from _built(value)
