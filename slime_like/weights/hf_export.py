"""Export the shards of all ranks as a stream of full tensors with Hugging Face names."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import GPTModelConfig
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES, Parameter, TensorPlan, plan_buckets
from slime_like.weights.families import EMBEDDING, OUTPUT_LAYER, head_name
from slime_like.weights.gather import WeightStream, find_senders
from slime_like.weights.mappings import ExpertSlice, Mapping, Sizes, VocabParallel
from slime_like.weights.parameter_map import (
    any_expert,
    expert_name,
    expert_number,
    family_map,
    float32_buffers,
    global_parameters,
    local_experts,
    model_sizes,
    unwrap,
)
from slime_like.weights.quantized import QuantizedWeight, encode_tensors, stored_plans
from slime_like.weights.stacked_experts import StackedExpert

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from slime_like.megatron.parallel_layout import ParallelLayout


class HfExport:
    """Exports a network any number of times; the metadata exchange between ranks happens once.

    The constructor and the iteration of `stream` are collectives over all ranks.

    parameters: those that hold separate tensors, in the order of the network.

    Args:
        dtype: Of the tensors; None: each parameter's own. What stays in float32 in a model in half
            precision keeps its own dtype.
        value_head: The network is a critic.
        untied_head: Export the output layer of a tied model as a separate weight, because only it
            has a delta.
        quantized: Weights to export quantised, by Hugging Face name.

    Raises:
        RuntimeError: If no stage has a parameter that the family needs.
    """

    def __init__(
        self,
        model_chunks: Sequence[MegatronModule],
        *,
        hf: HfModel,
        gpt: GPTModelConfig,
        layout: ParallelLayout,
        dtype: torch.dtype | None = None,
        value_head: bool = False,
        untied_head: bool = False,
        quantized: MappingOf[str, QuantizedWeight] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        config = unwrap(model_chunks[0]).config
        self._chunks = model_chunks
        self._layout = layout
        self._untied_head = untied_head
        self._sizes = model_sizes(config, gpt)
        self._quantized = quantized or {}
        self._family = family_map(
            hf.architecture,
            config,
            tied=not gpt.untie_embeddings_and_output_weights,
            value_head=value_head,
            mtp_layers=gpt.mtp_num_layers,
            # a frozen tower stays as it is in the files
            vision=gpt.vision if gpt.vision is not None and gpt.vision.trained else None,
        )
        if untied_head:
            self._family[OUTPUT_LAYER] = VocabParallel(head_name(hf.architecture))
        self._copies: dict[str, list[RowCopy]] = {}  # by parameter; shards keep their shapes
        # optimizer steps update these parameters in place
        self._local = self._local_parameters()
        experts = self._sizes.experts // layout.ep_size
        owners = _owners(self._local, layout, float32_buffers(model_chunks), dtype)
        self.parameters = _parameters(self._family, self._sizes, owners, self._quantized, experts)
        self._plan = plan_buckets(self.parameters, find_senders(layout), experts, bucket_bytes)

    @property
    def fixed(self) -> list[str]:
        """Names of the tables that the network reads and never exports."""
        tables = (mapping for mapping in self._family.values() if mapping.fixed)
        return [name for mapping in tables for name in mapping.hf_shapes(self._sizes)]

    def stream(self, deltas: MappingOf[str, Callable[[], Tensor]] | None = None) -> WeightStream:
        """Every Hugging Face tensor, in buckets of at most `bucket_bytes`, or of one larger
        parameter.

        Each sender keeps the order of the network. Tensors are newly allocated on the model's
        device, in `dtype` or the parameter's dtype, without vocabulary padding and without a tied
        output layer. deltas: canonical parameter name -> function that returns a float32 delta to
        add to this rank's shard.
        """
        local = self._local
        deltas = deltas or {}

        def read(name: str, dtype: torch.dtype) -> Tensor:
            tensor = local[name].detach()
            if name in deltas:
                tensor = (tensor.float() + deltas[name]()).detach()
            return tensor.to(dtype)

        def shard(parameter: Parameter) -> Tensor:
            if not parameter.stacked:
                return read(parameter.name, parameter.dtype)
            experts = local_experts(self._sizes, self._layout)
            names = [expert_name(parameter.name, expert) for expert in experts]
            return torch.stack([read(name, parameter.dtype) for name in names])

        device = next(iter(local.values())).device
        return WeightStream(self._plan, self._layout, device, shard, self._assemble)

    def full_tensors(
        self, parameter: Parameter, read: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """The outputs of a parameter in a layout of one rank.

        Args:
            read: Returns a parameter by its canonical name. Experts that are stored as one tensor
                are read one after the other.
        """
        names = [parameter.name]
        if parameter.stacked:
            names = [expert_name(parameter.name, expert) for expert in range(self._sizes.experts)]
        outputs = {
            plan.name: torch.empty(plan.shape, dtype=plan.dtype) for plan in parameter.outputs
        }
        self._merge(parameter, ((name, [read(name)]) for name in names), outputs)
        return outputs

    def _assemble(
        self, parameter: Parameter, shards: Sequence[Tensor], outputs: MappingOf[str, Tensor]
    ) -> None:
        parts = [(parameter.name, shards)]
        if parameter.stacked:
            # each shard has some experts; those of one expert-parallel rank have the same ones
            size = self._layout.etp_size
            same = [shards[i : i + size] for i in range(0, len(shards), size)]
            experts = enumerate(chain.from_iterable(zip(*each) for each in same))
            parts = [(expert_name(parameter.name, e), own) for e, own in experts]
        self._merge(parameter, parts, outputs)

    def _merge(
        self,
        parameter: Parameter,
        parts: Iterable[tuple[str, Sequence[Tensor]]],
        outputs: MappingOf[str, Tensor],
    ) -> None:
        """Write a parameter's outputs.

        Args:
            parts: Its name, or those of all experts that are stored as one tensor, with the shards
                of all tensor-parallel ranks.
        """
        shapes = self._family[parameter.name].hf_shapes(self._sizes)
        full = outputs
        if not self._quantized.keys().isdisjoint(shapes):
            device = next(iter(outputs.values())).device
            full = {
                name: torch.empty(shape, dtype=parameter.dtype, device=device)
                for name, shape in shapes.items()
            }
        for name, shards in parts:
            if name not in self._copies:
                self._copies[name] = row_copies(self._family[name], shards, self._sizes)
            copy_rows(self._copies[name], shards, full)
        if full is not outputs:
            for name, tensor in encode_tensors(full, self._quantized).items():
                outputs[name].copy_(tensor)

    def _local_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters, by canonical name."""
        local = dict(global_parameters(self._chunks))
        if self._untied_head and self._layout.is_last_stage and OUTPUT_LAYER not in local:
            # a single stage; with several, the last one has its own copy of the embedding
            local[OUTPUT_LAYER] = local[EMBEDDING]
        return local


Owner = tuple[int, tuple[int, ...], torch.dtype]


def _owners(
    parameters: dict[str, Tensor],
    layout: ParallelLayout,
    kept: Container[str],
    dtype: torch.dtype | None,
) -> dict[str, Owner]:
    """The pipeline stage of each parameter with the shape of its shard there and the dtype to
    export it in; the first stage if several have it. Experts are listed without their numbers,
    because the ranks of a stage have equal ones.

    Args:
        kept: Parameters that keep their own dtype.
        dtype: Of the others; None: their own.
    """

    def exported_dtype(name: str, parameter: Tensor) -> torch.dtype:
        return parameter.dtype if dtype is None or name in kept else dtype

    local = {
        any_expert(name): (layout.pp_rank, tuple(each.shape), exported_dtype(name, each))
        for name, each in parameters.items()
    }
    if layout.pp_size == 1:
        return local
    stages: list[dict[str, Owner]] = [{} for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, local, group=layout.pp_group)
    return dict(ChainMap(*stages))


def _parameters(
    family: MappingOf[str, Mapping],
    sizes: Sizes,
    owners: MappingOf[str, Owner],
    quantized: MappingOf[str, QuantizedWeight],
    experts: int,
) -> list[Parameter]:
    """Parameters that hold separate tensors, in the order of the network. The outputs of a
    parameter are sorted by dtype width, so that each is aligned. experts: per layer and rank."""
    exported: set[str] = set()
    parameters = []
    for name, mapping in family.items():
        shapes = mapping.hf_shapes(sizes)
        if mapping.fixed or shapes.keys() <= exported:
            continue
        if any_expert(name) not in owners:
            raise RuntimeError(f"no pipeline stage has the parameter {name}")
        stage, shape, dtype = owners[any_expert(name)]
        outputs: list[TensorPlan] = []
        for hf_name, hf_shape in shapes.items():
            outputs += stored_plans(TensorPlan(hf_name, hf_shape, dtype), quantized)
        outputs.sort(key=lambda plan: -plan.dtype.itemsize)
        stacked = isinstance(mapping, StackedExpert)
        parameter = Parameter(
            name,
            stage,
            expert_number(name),
            shape=(experts, *shape) if stacked else shape,
            dtype=dtype,
            sharded=mapping.sharded,
            outputs=tuple(outputs),
            stacked=stacked,
        )
        parameters.append(parameter)
        exported.update(shapes)  # `|=` with keys copies the set
    return parameters


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows of a shard that are rows of a Hugging Face tensor, along dimension `dim`."""

    shard: int  # index of the tensor-parallel rank
    position: int  # first row in the shard
    hf: str
    start: int  # first row in the tensor `hf`, or in a matrix within it
    length: int  # number of rows
    dim: int
    expert_slice: ExpertSlice | None
    flat: bool  # the rows are elements of a tensor with any dimensions


def row_copies(mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes) -> list[RowCopy]:
    """The rows of which the shards of all tensor-parallel ranks consist."""
    copies = []
    for tp_rank, shard in enumerate(shards):
        position = 0
        for part in mapping.parts(sizes, tp_rank, len(shards), rows=shard.shape[mapping.dim]):
            if part.hf is not None:
                source = (tp_rank, position, part.hf, part.start, len(part))
                copies.append(RowCopy(*source, mapping.dim, part.expert_slice, mapping.flat))
            position += len(part)
    return copies


def copy_rows(
    copies: Sequence[RowCopy], shards: Sequence[Tensor], full: MappingOf[str, Tensor]
) -> None:
    """Copy the shards of all tensor-parallel ranks into existing full tensors."""
    for copy in copies:
        target = full[copy.hf]
        if copy.expert_slice is not None:
            target = copy.expert_slice.matrix(target[copy.expert_slice.expert])
        if copy.flat:
            target = target.view(-1)
        target = target.narrow(copy.dim, copy.start, copy.length)
        target.copy_(shards[copy.shard].narrow(copy.dim, copy.position, copy.length))
