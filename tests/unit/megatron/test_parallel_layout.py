"""Layouts that take turns on one process: what is exchanged is all that making a layout changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import megatron_patches

megatron_patches.apply()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402

from arguments.schema import ParallelConfig  # noqa: E402
from slime_like.megatron.init import make_further_layout, make_layout  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout, parallel_globals  # noqa: E402
from slime_like.megatron.rng import RandomStates  # noqa: E402


@pytest.fixture
def two() -> Iterator[tuple[ParallelLayout, ParallelLayout]]:
    """The first is in force."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first = make_layout(ParallelConfig(), virtual_stages=None, seed=1)
        yield first, make_further_layout(ParallelConfig(), virtual_stages=None, seed=2)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_every_global_is_exchanged(two: tuple[ParallelLayout, ParallelLayout]) -> None:
    """megatron-core's next release may have others: whatever differs between before and after must
    be among those that we know."""

    def everything() -> dict[str, int]:
        return {name: id(value) for name, value in vars(parallel_state).items()}

    first, second = two
    before, known = everything(), parallel_globals()
    with second.activate():
        there = everything()
        assert (
            parallel_state.get_tensor_model_parallel_group()
            is second.tp_group
            is not first.tp_group
        )
    changed = {name for name in before if before[name] != there[name]}
    assert {
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        "_GLOBAL_MEMORY_BUFFER",
        "_EMBEDDING_GROUP",
    } <= changed
    assert changed <= known.keys() and everything() == before
    parallel_state.destroy_model_parallel()
    made = everything()
    parallel_state.initialize_model_parallel()
    assert {name for name in made if made[name] != everything()[name]} - {
        "_global_process_group_list"
    } <= known.keys()


def test_random_states_continue_where_they_were(two: tuple[ParallelLayout, ParallelLayout]) -> None:
    first, second = two

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(())
        return [float(torch.rand(())), float(tracked)]

    def six(*turns: ParallelLayout) -> list[list[float]]:
        drawn = []
        for layout in turns:
            with layout.activate():
                drawn.append(draw())
        return drawn

    start = RandomStates.now()
    with second.activate():
        other_start = RandomStates.now()
    mixed = six(first, second, first, second, second, first)
    start.restore()
    with second.activate():
        other_start.restore()
    alone, others = six(first, first, first), six(second, second, second)
    assert [mixed[i] for i in (0, 2, 5)] == alone and [mixed[i] for i in (1, 3, 4)] == others
    assert len({number for pair in mixed for number in pair}) == 12


def test_layouts_do_not_nest(two: tuple[ParallelLayout, ParallelLayout]) -> None:
    first, second = two
    with second.activate():
        with second.activate():
            pass
        with pytest.raises(AssertionError, match="layouts do not nest"), first.activate():
            pass
        assert parallel_state.get_tensor_model_parallel_group() is second.tp_group
    with pytest.raises(ZeroDivisionError), second.activate():
        1 / 0  # noqa: B018
    assert parallel_state.get_tensor_model_parallel_group() is first.tp_group
