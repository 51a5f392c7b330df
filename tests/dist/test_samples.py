"""Samples between real gloo processes: everyone gets what it trains on, bit by bit, and sends what
the arithmetic says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks
from benchmarks.simulated_ranks import LayoutSizes, SimulatedRank, run_simulated
from slime_like.distributed.exchange import Sharing
from slime_like.samples.episodes import complete
from slime_like.samples.exchange import (
    deliver_samples,
    gather_on_rank_zero,
    plan_delivery,
    share_index,
)
from slime_like.samples.index import RemoteSample
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus

COUNT, BUFFER = 24, 600


def made(i: int) -> Sample:
    """Of another shape for every i."""
    g = torch.Generator().manual_seed(i)
    prompt, length = 1 + i % 5, (7 * i) % 31
    sets = torch.randint(-1, 50, (length, 1 + i % 3), generator=g, dtype=torch.int32)
    versions = tuple([1, 2, NOT_SAMPLED][k % (1 + i % 3)] for k in range(length))
    return Sample(
        group_id=i // 4,
        sample_id=i,
        tokens=torch.randint(0, 90, (prompt + length,), generator=g),
        response_length=length,
        loss_mask=torch.rand(length, generator=g) > 0.3,
        rollout_log_probs=torch.rand(length, generator=g) if i % 4 else None,
        sampling_mask=sets if i % 2 else None,
        routed_experts=torch.ones(prompt + length, 2, 2, dtype=torch.int16) * i if i % 3 else None,
        indexer_topk=torch.full((max(0, prompt + length - 5), 2, 5), i, dtype=torch.int32)
        if i % 3 == 1
        else None,
        reward=i / 3 if i % 5 else None,
        status=SampleStatus.TRUNCATED if i % 2 else SampleStatus.COMPLETED,
        weight_versions=versions if i % 7 else (),
        response=f"answer {i}",
        metadata={"where": (i, "\ud800")},
    )


def same(arrived: Sample, sent: Sample) -> bool:
    names = ("tokens", "loss_mask", "rollout_log_probs", "sampling_mask", "routed_experts")
    names += ("indexer_topk",)
    pairs = [(getattr(arrived, name), getattr(sent, name)) for name in names]
    tensors = all(a is b or (a.dtype == b.dtype and a.equal(b)) for a, b in pairs)
    facts = ("sample_id", "group_id", "reward", "status", "weight_versions", "response_length")
    return tensors and all(getattr(arrived, n) == getattr(sent, n) for n in facts)


def exchange(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, int]:
    """One after the other with all samples on rank 0, and on all ranks in turn; on the last of them
    without any. Returns what this rank has sent and got."""
    holders = {
        "zero": [0] * COUNT,
        "all": [i % world for i in range(COUNT)],
        "not the last": [i % (world - 1) for i in range(COUNT)],
    }[arguments["holders"]]
    own = [made(i) for i in range(COUNT) if holders[i] == rank]
    known = share_index(own, holders)
    assert [isinstance(s, RemoteSample) for s in known] == [h != rank for h in holders]
    # two ranks to a part where there are four, and a critic in its own layout
    policy = Sharing(np.arange(world) % max(1, world // 2), np.arange(COUNT) % max(1, world // 2))
    critic = Sharing(np.arange(world), np.arange(COUNT) * world // COUNT)
    sharings = [policy, critic]
    found = deliver_samples(known, sharings, buffer_size=BUFFER)
    delivery = plan_delivery(known, rank, sharings, BUFFER)
    assert sorted(found.samples) == np.flatnonzero(delivery.wanted_by(rank)).tolist()
    assert all(same(sample, made(i)) for i, sample in found.samples.items())
    messages = [m for hop in delivery.hops(rank) for m in hop]
    counted = sum(m.nbytes for m in messages if m.source == rank)
    assert (found.traffic.sent, found.traffic.largest_buffer <= BUFFER) == (counted, True)
    assert found.traffic.received == sum(m.nbytes for m in messages if m.source != rank)
    full = gather_on_rank_zero(known, buffer_size=BUFFER)
    if rank == 0:
        every = complete(full)
        assert all(same(sample, made(i)) for i, sample in enumerate(every))
        assert [s.response for s in every] == [made(i).response for i in range(COUNT)]
        assert [s.metadata for s in every] == [made(i).metadata for i in range(COUNT)]
    dist.barrier()
    return {"sent": found.traffic.sent, "received": found.traffic.received}


@pytest.mark.parametrize(
    ("world", "holders"),
    [
        (2, "zero"),
        (4, "all"),
        (4, "not the last"),
        pytest.param(8, "zero", marks=pytest.mark.extended),
        pytest.param(16, "zero", marks=pytest.mark.slow),
        pytest.param(32, "all", marks=pytest.mark.slow),
    ],
)
def test_samples_go_where_they_are_trained_on(tmp_path: Path, world: int, holders: str) -> None:
    totals = run_ranks(
        "tests.dist.test_samples:exchange", world, tmp_path, {"holders": holders}, timeout_s=300
    )
    assert sum(t["sent"] for t in totals) == sum(t["received"] for t in totals) > 0

    def simulated(rank: SimulatedRank) -> dict[str, int]:
        return exchange(rank.layout.rank, world, {"holders": holders})

    assert run_simulated(world, LayoutSizes(), simulated, timeout_s=300) == totals


def test_the_index_does_not_grow_with_the_ranks() -> None:
    """All samples on rank 0, as with servers: it comes once, however many ranks there are."""

    def received(rank: SimulatedRank) -> int:
        own = [made(i) for i in range(COUNT)] if rank.layout.rank == 0 else []
        known = share_index(own, [0] * COUNT)
        assert [s.sample_id for s in known] == list(range(COUNT))
        return rank.groups["world"].received

    few, many = (run_simulated(n, LayoutSizes(), received, timeout_s=300) for n in (4, 128))
    assert few[0] == 0 and set(few[1:]) == set(many[1:]) and few[1] < COUNT * 200
