"""Export the shards of all ranks as a stream of full tensors with Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import GPTModelConfig
from slime_like.weights.families import EMBEDDING, LM_HEAD, OUTPUT_LAYER
from slime_like.weights.gather import (
    DEFAULT_BUCKET_BYTES,
    Parameter,
    TensorPlan,
    WeightStream,
    find_senders,
    plan_buckets,
)
from slime_like.weights.mappings import Mapping, OfExpert, Sizes, VocabParallel
from slime_like.weights.parameter_map import (
    any_expert,
    expert_number,
    family_map,
    global_parameters,
    model_sizes,
    of_expert,
    own_experts,
    unwrap,
)
from slime_like.weights.quantized import CodedWeight, encode_tensors, stored_plans
from slime_like.weights.stacked_experts import StackedExpert

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from slime_like.megatron.parallel_layout import ParallelLayout


class HfExport:
    """Exports a network any number of times; the metadata exchange between ranks happens once.

    The constructor and the iteration of `stream` are collectives over all ranks. value_head: the
    network is a critic. own_head: export the output layer of a tied model as a separate weight,
    because only it has a delta. coded: weights, by Hugging Face name, that are exported quantised,
    with the tensors that store them. Raises RuntimeError if no stage has a parameter that the
    family needs.
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
        own_head: bool = False,
        coded: MappingOf[str, CodedWeight] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        config = unwrap(model_chunks[0]).config
        self._chunks, self._layout, self._own_head = model_chunks, layout, own_head
        self._sizes, self._coded = model_sizes(config, gpt), coded or {}
        self._family = family_map(
            hf.architecture,
            config,
            tied=not gpt.untie_embeddings_and_output_weights,
            value_head=value_head,
            predicting=gpt.mtp_num_layers,
        )
        if own_head:
            self._family = {**self._family, OUTPUT_LAYER: VocabParallel(LM_HEAD)}
        self._copies: dict[str, list[RowCopy]] = {}  # by parameter; shards keep their shapes
        # optimizer steps update these parameters in place
        self._local = self._local_parameters()
        experts, owners = self._sizes.experts // layout.ep_size, _owners(self._local, layout)
        self._plan = plan_buckets(
            _parameters(self._family, self._sizes, owners, dtype, self._coded, experts),
            find_senders(layout),
            experts,
            bucket_bytes,
        )

    def stream(self, deltas: MappingOf[str, Callable[[], Tensor]] | None = None) -> WeightStream:
        """Every Hugging Face tensor, in buckets of at most `bucket_bytes`, or of one larger
        parameter.

        Each sender keeps the order of the network. Tensors are newly allocated on the model's
        device, in `dtype` or the parameter's dtype, without vocabulary padding and without a tied
        output layer. deltas: canonical parameter name -> function that returns a float32 delta to
        add to this rank's shard.
        """
        local, added = self._local, deltas or {}

        def one(name: str, dtype: torch.dtype) -> Tensor:
            tensor = local[name].detach()
            if name in added:
                tensor = (tensor.float() + added[name]()).detach()
            return tensor.to(dtype)

        def shard(parameter: Parameter) -> Tensor:
            if not parameter.stacked:
                return one(parameter.name, parameter.dtype)
            own = own_experts(self._sizes, self._layout)
            return torch.stack([one(of_expert(parameter.name, e), parameter.dtype) for e in own])

        device = next(iter(local.values())).device
        return WeightStream(self._plan, self._layout, device, shard, self._assemble)

    def _assemble(
        self, parameter: Parameter, shards: Sequence[Tensor], outputs: MappingOf[str, Tensor]
    ) -> None:
        mapping = self._family[parameter.name]
        names, each = [parameter.name], [shards]
        if parameter.stacked:
            each = [[tensor] for of_rank in shards for tensor in of_rank]
            names = [of_expert(parameter.name, e) for e in range(len(each))]
        if not self._coded or self._coded.keys().isdisjoint(mapping.hf_shapes(self._sizes)):
            for name, parts in zip(names, each, strict=True):
                if name not in self._copies:
                    self._copies[name] = copies_of(self._family[name], parts, self._sizes)
                copy_rows(self._copies[name], parts, outputs)
            return
        full = gather_full_tensors(mapping, shards, self._sizes)
        for name, tensor in encode_tensors(full, self._coded).items():
            outputs[name].copy_(tensor)

    def _local_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters, by canonical name."""
        local = dict(global_parameters(self._chunks))
        if self._own_head and self._layout.is_last_stage and OUTPUT_LAYER not in local:
            # a single stage; with several, the last one has its own copy of the embedding
            local[OUTPUT_LAYER] = local[EMBEDDING]
        return local


def export_hf_weights(
    model_chunks: Sequence[MegatronModule],
    *,
    deltas: MappingOf[str, Callable[[], Tensor]] | None = None,
    **settings: Any,
) -> WeightStream:
    """Export once, with the settings of `HfExport`."""
    return HfExport(model_chunks, **settings).stream(deltas)


Owner = tuple[int, tuple[int, ...], torch.dtype]


def _owners(local: dict[str, Tensor], layout: ParallelLayout) -> dict[str, Owner]:
    """The pipeline stage of each parameter with the shape and dtype of its shard there; the first
    stage if several have it. Experts are listed without their numbers, because the ranks of a stage
    have equal ones."""
    mine = {
        any_expert(name): (layout.pp_rank, tuple(parameter.shape), parameter.dtype)
        for name, parameter in local.items()
    }
    if layout.pp_size == 1:
        return mine
    stages: list[dict[str, Owner]] = [{} for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, mine, group=layout.pp_group)
    return {name: owner for stage in reversed(stages) for name, owner in stage.items()}


def _parameters(
    family: MappingOf[str, Mapping],
    sizes: Sizes,
    owners: MappingOf[str, Owner],
    dtype: torch.dtype | None,
    coded: MappingOf[str, CodedWeight],
    experts: int,
) -> list[Parameter]:
    """Parameters that hold separate tensors, in the order of the network. The outputs of a
    parameter are sorted by dtype width, so that each is aligned. experts: per layer and rank."""
    done: set[str] = set()
    found = []
    for name, mapping in family.items():
        shapes = mapping.hf_shapes(sizes)
        if shapes.keys() <= done:
            continue
        if any_expert(name) not in owners:
            raise RuntimeError(f"no pipeline stage has the parameter {name}")
        stage, shape, own_dtype = owners[any_expert(name)]
        kept = dtype or own_dtype
        outputs = [
            stored
            for hf_name, whole in shapes.items()
            for stored in stored_plans(TensorPlan(hf_name, whole, kept), coded)
        ]
        outputs.sort(key=lambda plan: -plan.dtype.itemsize)
        expert, stacked = expert_number(name), isinstance(mapping, StackedExpert)
        shape = (experts, *shape) if stacked else shape
        found.append(
            Parameter(name, stage, expert, shape, kept, mapping.sharded, tuple(outputs), stacked)
        )
        done.update(shapes)  # `|=` with keys copies the set
    return found


def gather_full_tensors(
    mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes
) -> dict[str, Tensor]:
    """Merge the shards of all tensor-parallel ranks into the Hugging Face tensors of one
    parameter."""
    whole = {name: shards[0].new_empty(shape) for name, shape in mapping.hf_shapes(sizes).items()}
    put_together(mapping, shards, sizes, whole)
    return whole


def put_together(
    mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes, whole: MappingOf[str, Tensor]
) -> None:
    """Like `gather_full_tensors`, into existing tensors."""
    copy_rows(copies_of(mapping, shards, sizes), shards, whole)


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows of a shard that are rows of a Hugging Face tensor, along dimension `dim`.

    shard: index of the tensor-parallel rank. position: first row in the shard. start: first row in
    the tensor `hf`, or in a matrix within it. length: number of rows.
    """

    shard: int
    position: int
    hf: str
    start: int
    length: int
    dim: int
    inside: OfExpert | None


def copies_of(mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes) -> list[RowCopy]:
    """The rows of which the shards of all tensor-parallel ranks consist."""
    found = []
    for tp_rank, shard in enumerate(shards):
        position = 0
        for part in mapping.parts(sizes, tp_rank, len(shards), rows=shard.shape[mapping.dim]):
            if part.hf is not None:
                place = (tp_rank, position, part.hf, part.start, len(part))
                found.append(RowCopy(*place, mapping.dim, part.inside))
            position += len(part)
    return found


def copy_rows(
    copies: Sequence[RowCopy], shards: Sequence[Tensor], whole: MappingOf[str, Tensor]
) -> None:
    """Copy the shards of all tensor-parallel ranks into existing full tensors."""
    for copy in copies:
        target = whole[copy.hf]
        if copy.inside is not None:
            target = copy.inside.matrix(target[copy.inside.expert])
        target = target.narrow(copy.dim, copy.start, copy.length)
        target.copy_(shards[copy.shard].narrow(copy.dim, copy.position, copy.length))
