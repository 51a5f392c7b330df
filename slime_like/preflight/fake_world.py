"""Simulate one rank of a larger world: torch's fake process groups, where every collective returns
immediately, under megatron-core's real groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from arguments.schema import ParallelConfig
from slime_like.megatron.init import model_parallel_groups
from slime_like.megatron.parallel_layout import ParallelLayout


@contextmanager
def world_as_rank(
    parallel: ParallelConfig, *, virtual_stages: int | None, rank: int, world_size: int
) -> Iterator[ParallelLayout]:
    """The layout as seen by `rank` of `world_size`. Requires that no process group exists yet."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    make = parallel_state.create_group

    def without_backend(*positional: object, **named: object) -> object:
        named.pop("backend", None)  # gloo, for checkpoints: its groups would connect to peers
        return make(*positional, **named)

    parallel_state.create_group = without_backend
    try:
        with model_parallel_groups(parallel, virtual_stages=virtual_stages, seed=0) as layout:
            yield layout
    finally:
        parallel_state.create_group = make
        dist.destroy_process_group()
