"""Gather and scatter parts of different lengths over gloo.

Target    tensor_parallel.mappings: _gather_along_first_dim and _reduce_scatter_along_first_dim,
          when called with sizes.
Why       With both expert and tensor parallelism, the ranks of an expert's tensor-parallel group
          gather their tokens, which differ in number, and scatter the summed outputs back. NCCL
          accepts lists of tensors of different lengths for this, gloo does not.
Without   The MoE layers raise an error.
How       The parts are padded to the longest one, so that gloo's collectives of equal parts apply.
          Calls without sizes go to the original functions.
When      No CUDA device, i.e. gloo process groups.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.patch import NO_CUDA, Patch, find, missing

NAME = "gloo_uneven"
MODULE = "tensor_parallel.mappings"
TARGETS = {
    "_gather_along_first_dim": "output_split_sizes",
    "_reduce_scatter_along_first_dim": "input_split_sizes",
}


def uneven_gather(part: Tensor, group: object, sizes: Sequence[int]) -> Tensor:
    """All-gather `part` [sizes[rank], ...] of every rank into [sum(sizes), ...]."""
    longest = max(sizes)
    padded = part.new_zeros(longest, *part.shape[1:])
    padded[: part.size(0)] = part
    gathered = part.new_empty(longest * len(sizes), *part.shape[1:])
    if not longest:
        return gathered
    dist.all_gather_into_tensor(gathered, padded, group=group)
    parts = zip(gathered.split(longest), sizes, strict=True)
    return torch.cat([padded_part[:size] for padded_part, size in parts])


def uneven_reduce_scatter(full: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Reduce-scatter `full` [sum(sizes), ...]: the sum over ranks of this rank's part,
    [sizes[rank], ...]."""
    longest = max(sizes)
    part = full.new_empty(longest, *full.shape[1:])
    if longest:
        padded = full.new_zeros(len(sizes), longest, *full.shape[1:])
        for slot, piece in zip(padded, full.split(list(sizes)), strict=True):
            slot[: piece.size(0)] = piece
        dist.reduce_scatter_tensor(part, padded.flatten(0, 1), group=group)
    return part[: sizes[group.rank()]]


def check() -> None:
    for name, sizes in TARGETS.items():
        target = f"{MODULE}:{name}"
        parameters = list(inspect.signature(find(NAME, target)).parameters)
        if parameters[:3] != ["input_", "group", sizes]:
            raise missing(NAME, f"megatron.core.{target} no longer takes (input_, group, {sizes})")


def install() -> None:
    module = find(NAME, MODULE)
    for name, uneven in (
        ("_gather_along_first_dim", uneven_gather),
        ("_reduce_scatter_along_first_dim", uneven_reduce_scatter),
    ):
        setattr(module, name, _with_sizes(getattr(module, name), uneven))


def _with_sizes(
    original: Callable[..., Tensor], uneven: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def patched(
        input_: Tensor,
        group: dist.ProcessGroup,
        sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return original(input_, group, sizes, use_global_buffer)
        return uneven(input_.contiguous(), group, [int(size) for size in sizes])

    return patched


PATCH = Patch(NAME, NO_CUDA, check, install)
