"""The shards of all ranks -> a stream of whole tensors under their Hugging Face names, the same on
every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as MappingOf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import GPTModelConfig
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.families import EMBEDDING, LM_HEAD, OUTPUT_LAYER
from slime_like.weights.mappings import Mapping, Sizes, VocabParallel
from slime_like.weights.parameter_map import (
    any_expert,
    expert_number,
    family_map,
    global_parameters,
    model_sizes,
    unwrap,
)


def export_hf_weights(
    model_chunks: Sequence[Any],
    *,
    hf: HfModel,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    deltas: MappingOf[str, Callable[[], Tensor]] | None = None,
    own_head: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every Hugging Face tensor, in the order of the network.

    A collective operation: all ranks of a copy of the model (tensor-, pipeline- and
    expert-parallel) must take the same steps of the iterator, to the end; all get the same tensors.
    Tensors are new ones on the model's device, in `dtype` or that of the parameter. At any time one
    parameter is held whole (twice while it is put together). Padding is dropped; a tied output
    layer is not repeated. value_head: the network is a critic. deltas: by a parameter's canonical
    name, what is added to this rank's shard of it, in float32. own_head: of a tied model, the
    output layer is a weight of its own in what comes out, for there is a delta to it alone. Raises
    RuntimeError when no stage has a parameter that the family needs.
    """
    config = unwrap(model_chunks[0]).config
    sizes = model_sizes(config, gpt)
    family = family_map(
        hf.architecture,
        config,
        tied=not gpt.untie_embeddings_and_output_weights,
        value_head=value_head,
    )
    local = dict(global_parameters(model_chunks))
    if own_head:
        family = {**family, OUTPUT_LAYER: VocabParallel(LM_HEAD)}
        if (
            layout.is_last_stage and OUTPUT_LAYER not in local
        ):  # the only stage; with several the last has the embedding's twin
            local[OUTPUT_LAYER] = local[EMBEDDING]
    device = next(iter(local.values())).device
    owners = _owners(local, layout)
    done: set[str] = set()
    added = deltas or {}
    for name, mapping in family.items():
        if mapping.hf_shapes(sizes).keys() <= done:
            continue
        if any_expert(name) not in owners:
            raise RuntimeError(f"no pipeline stage has the parameter {name}")
        owner, shape, own_dtype = owners[any_expert(name)]
        if owner == layout.pp_rank and name in local:
            shard = local[name].detach()
            if name in added:
                shard = (shard.float() + added[name]()).detach()
            shard = shard.to(dtype or own_dtype).contiguous()
        else:
            shard = torch.empty(shape, dtype=dtype or own_dtype, device=device)
        shards = shards_of_all_ranks(
            shard, owner, expert_number(name), mapping.sharded, sizes, layout
        )
        yield from gather_full_tensors(mapping, shards, sizes).items()
        done |= mapping.hf_shapes(sizes).keys()


def shards_of_all_ranks(
    shard: Tensor,
    stage: int,
    expert: int | None,
    sharded: bool,
    sizes: Sizes,
    layout: ParallelLayout,
) -> list[Tensor]:
    """Fill `shard` from pipeline stage `stage` (and the rank that has `expert`), then gather those
    of its tensor-parallel group."""
    holder = None if expert is None else expert * layout.ep_size // sizes.experts
    if layout.pp_size > 1 and holder in (None, layout.ep_rank):
        dist.broadcast(
            shard, src=dist.get_global_rank(layout.pp_group, stage), group=layout.pp_group
        )
    if layout.ep_size > 1 and holder is not None:
        dist.broadcast(
            shard, src=dist.get_global_rank(layout.ep_group, holder), group=layout.ep_group
        )
    size, group = (
        (layout.tp_size, layout.tp_group) if expert is None else (layout.etp_size, layout.etp_group)
    )
    if not sharded or size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard, group=group)
    return shards


Owner = tuple[int, tuple[int, ...], torch.dtype]


def _owners(local: dict[str, Tensor], layout: ParallelLayout) -> dict[str, Owner]:
    """Which pipeline stage has each parameter, and its shard's shape and dtype there. The first one
    where several have it. Experts without their numbers: the stages' ranks in one group have the
    same ones."""
    mine = {
        any_expert(name): (layout.pp_rank, tuple(parameter.shape), parameter.dtype)
        for name, parameter in local.items()
    }
    if layout.pp_size == 1:
        return mine
    stages: list[dict[str, Owner]] = [{} for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, mine, group=layout.pp_group)
    return {name: owner for stage in reversed(stages) for name, owner in stage.items()}


def gather_full_tensors(
    mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes
) -> dict[str, Tensor]:
    """The Hugging Face tensors of one parameter, put together from the shards of all
    tensor-parallel ranks."""
    whole = {name: shards[0].new_empty(shape) for name, shape in mapping.hf_shapes(sizes).items()}
    for tp_rank, shard in enumerate(shards):
        position = 0
        for part in mapping.parts(sizes, tp_rank, len(shards), rows=shard.shape[mapping.dim]):
            if part.hf is not None:
                target = whole[part.hf].narrow(mapping.dim, part.start, len(part))
                target.copy_(shard.narrow(mapping.dim, position, len(part)))
            position += len(part)
    return whole
