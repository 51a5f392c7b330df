"""The shards of all ranks -> a stream of whole tensors under their Hugging Face names, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.groups import GPTModelConfig
from arguments.hf_model import HfModel
from slime_like.convert.families import family_map, global_parameters, model_sizes, unwrap
from slime_like.convert.mappings import Mapping, Sizes
from slime_like.megatron_backend.layout import ParallelLayout


def export_hf_weights(
    model_chunks: Sequence[Any],
    *,
    hf: HfModel,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every Hugging Face tensor, in the order of the network.

    A collective operation: all ranks of a copy of the model (tensor- and pipeline-parallel) must take the same steps of the
    iterator, to the end; all get the same tensors. Tensors are new ones on the model's device, in `dtype` or that of the
    parameter. At any time one parameter is held whole (twice while it is put together). Padding is dropped; a tied output
    layer is not repeated. Raises RuntimeError when no stage has a parameter that the family needs.
    """
    config = unwrap(model_chunks[0]).config
    sizes = model_sizes(config, gpt)
    family = family_map(hf.architecture, config.num_layers, tied=not gpt.untie_embeddings_and_output_weights)
    local = dict(global_parameters(model_chunks))
    device = next(iter(local.values())).device
    owners = _owners(local, layout)
    done: set[str] = set()
    for name, mapping in family.items():
        if mapping.hf_shapes(sizes).keys() <= done:
            continue
        if name not in owners:
            raise RuntimeError(f"no pipeline stage has the parameter {name}")
        owner, shape, own_dtype = owners[name]
        if owner == layout.pp_rank:
            shard = local[name].detach().to(dtype or own_dtype).contiguous()
        else:
            shard = torch.empty(shape, dtype=dtype or own_dtype, device=device)
        if layout.pp_size > 1:
            dist.broadcast(shard, src=dist.get_global_rank(layout.pp_group, owner), group=layout.pp_group)
        shards = [shard]
        if mapping.sharded and layout.tp_size > 1:
            shards = [torch.empty_like(shard) for _ in range(layout.tp_size)]
            dist.all_gather(shards, shard, group=layout.tp_group)
        yield from _whole(mapping, shards, sizes).items()
        done |= mapping.hf_shapes(sizes).keys()


Owner = tuple[int, tuple[int, ...], torch.dtype]


def _owners(local: dict[str, Tensor], layout: ParallelLayout) -> dict[str, Owner]:
    """Which pipeline stage has each parameter, and its shard's shape and dtype there. The first one where several have it."""
    mine = {name: (layout.pp_rank, tuple(parameter.shape), parameter.dtype) for name, parameter in local.items()}
    if layout.pp_size == 1:
        return mine
    stages: list[dict[str, Owner]] = [{} for _ in range(layout.pp_size)]
    dist.all_gather_object(stages, mine, group=layout.pp_group)
    return {name: owner for stage in reversed(stages) for name, owner in stage.items()}


def _whole(mapping: Mapping, shards: Sequence[Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """The Hugging Face tensors of one parameter, put together from the shards of all tensor-parallel ranks."""
    whole = {name: shards[0].new_empty(shape) for name, shape in mapping.hf_shapes(sizes).items()}
    for tp_rank, shard in enumerate(shards):
        position = 0
        for part in mapping.parts(sizes, tp_rank, len(shards), rows=shard.shape[mapping.dim]):
            if part.hf is not None:
                target = whole[part.hf].narrow(mapping.dim, part.start, len(part))
                target.copy_(shard.narrow(mapping.dim, position, len(part)))
            position += len(part)
    return whole
