"""benchmarks/simulated_ranks.py: bytes arrive, ranks are laid out as megatron-core does it, and
what would hang real processes is an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from arguments.schema import ParallelConfig
from benchmarks.simulated_ranks import (
    LayoutSizes,
    SimulatedRank,
    SimulationFailed,
    run_simulated,
)
from slime_like.preflight.fake_world import world_as_rank

GROUPS = (
    *("tp_group", "pp_group", "cp_group", "dp_group", "dp_cp_group"),
    *("ep_group", "etp_group", "etp_ep_group"),
)


def talk(rank: SimulatedRank) -> dict[str, object]:
    """One of each kind, with bytes in them."""
    me, group = dist.get_rank(), rank.layout.tp_group
    first = 2 * (me // 2)
    reported = torch.tensor([me])
    dist.broadcast(reported, src=3)
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(2)] if me == first else None
    dist.gather(torch.tensor([10 * me]), rows, dst=first, group=group)
    passed = torch.tensor([me])
    if me == 0:
        dist.send(passed, dst=3)
    elif me == 3:
        dist.recv(passed, src=0)
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, "x" * me)
    box = [("from", me)]
    dist.broadcast_object_list(box, src=0)
    return {
        "told": reported.item(),
        "rows": None if rows is None else [int(row) for row in rows],
        "passed": passed.item(),
        "everyone": everyone,
        "box": box[0],
        "sent": rank.groups["tp"].sent,
        "received": rank.groups["tp"].received,
    }


def test_bytes_arrive_and_are_counted() -> None:
    found = run_simulated(4, LayoutSizes(tp=2), talk, timeout_s=300)
    assert [one["told"] for one in found] == [3] * 4
    assert [one["rows"] for one in found] == [[0, 10], None, [20, 30], None]
    assert [one["passed"] for one in found] == [0, 1, 2, 0]
    assert all(one["everyone"] == ["", "x", "xx", "xxx"] for one in found)
    assert all(one["box"] == ("from", 0) for one in found)
    assert [(one["sent"], one["received"]) for one in found] == [(0, 8), (8, 0)] * 2
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(256, LayoutSizes(4, 2, 32, 1)), (64, LayoutSizes(2, 4, 2, 4)), (16, LayoutSizes(2, 2, cp=2))],
    ids=str,
)
def test_layouts_are_those_of_megatron_core(world: int, sizes: LayoutSizes) -> None:
    def own(rank: SimulatedRank) -> tuple[str, tuple[int, ...], dict[str, list[int]]]:
        layout = rank.layout
        places = (layout.pp_rank, layout.ep_rank, layout.etp_rank, layout.expert_dp_rank)
        groups = {name: list(getattr(layout, name).ranks) for name in GROUPS}
        return layout.describe(), places, groups

    found = run_simulated(world, sizes, own, timeout_s=300)
    parallel = ParallelConfig(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        context_parallel_size=sizes.cp,
    )
    for rank in (0, world // 2 + 1, world - 2):
        with world_as_rank(parallel, virtual_stages=None, rank=rank, world_size=world) as layout:
            places = (layout.pp_rank, layout.ep_rank, layout.etp_rank, layout.expert_dp_rank)
            groups = {n: dist.get_process_group_ranks(getattr(layout, n)) for n in GROUPS}
            assert found[rank] == (layout.describe(), places, groups)


def test_sizes_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="does not divide 6 ranks"):
        LayoutSizes(tp=4).groups(6)


def test_ranks_that_call_different_collectives() -> None:
    def work(rank: SimulatedRank) -> None:
        if dist.get_rank() == 0:
            dist.broadcast(torch.zeros(1), src=0)
        else:
            dist.gather(torch.zeros(1), dst=0)

    with pytest.raises(SimulationFailed, match="calls"):
        run_simulated(2, LayoutSizes(), work, timeout_s=300)


def test_ranks_that_send_different_sizes() -> None:
    def work(rank: SimulatedRank) -> None:
        dist.broadcast(torch.zeros(1 + dist.get_rank(), device="meta"), src=0)

    with pytest.raises(SimulationFailed, match="4 bytes for a buffer of 8"):
        run_simulated(2, LayoutSizes(), work, timeout_s=300)


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(rank: SimulatedRank) -> None:
        if dist.get_rank() == 1:
            raise OSError("of rank 1")
        dist.broadcast(torch.zeros(1), src=0)

    with pytest.raises(OSError, match="of rank 1"):
        run_simulated(3, LayoutSizes(), work, timeout_s=300)


def test_a_rank_that_does_not_come() -> None:
    def work(rank: SimulatedRank) -> None:
        if dist.get_rank() != 1:
            dist.broadcast(torch.zeros(1), src=0)

    with pytest.raises(SimulationFailed, match="broadcast of 3 ranks: only"):
        run_simulated(3, LayoutSizes(), work, timeout_s=1.0)
