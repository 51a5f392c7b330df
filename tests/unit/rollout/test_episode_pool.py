"""The pool of --fully-async: what starts, what waits and what is taken, in random worlds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from slime_like.data.group_buffer import PendingGroup
from slime_like.rollout.episode_pool import EpisodePool, PoolSettings
from slime_like.types import Prompt, Sample, SampleStatus


def group(number: int, started: int, *, ended: bool = False, size: int = 1) -> PendingGroup:
    """Of one sample, or a part with one sample of a group of `size`."""
    group_id = number // size
    prompt = Prompt(group_id, "", (1,))
    status = SampleStatus.COMPLETED if ended else SampleStatus.PARTIAL
    sample = Sample(group_id, number, torch.tensor([1, 2]), 1, torch.ones(1).bool(), status=status)
    return PendingGroup(prompt, (sample,), started)


@dataclass
class World:
    """Groups end after random numbers of rounds, a tenth after twenty times as many; the rollout
    after the one that is trained on is taken as soon as it is ready."""

    settings: PoolSettings
    random: random.Random
    ahead: int  # rollouts that are taken before they are trained on
    size: int  # samples of a prompt, each of which is taken alone
    pool: EpisodePool = field(init=False)
    left: dict[int, int] = field(default_factory=dict)  # rounds of the groups in flight
    next_id: int = 0
    taken: list[tuple[int, int, int]] = field(default_factory=list)  # (rollout, sample, start)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.pool = EpisodePool(self.settings)

    def rollout(self, j: int) -> None:
        clock = max(0, j - self.ahead)
        for _ in range(10_000):
            room = self.pool.room(clock)
            started = [group(self.next_id + i, clock, size=self.size) for i in range(room)]
            self.next_id += room
            self.pool.start(started)
            for each in started:
                skew = 20 if self.random.random() < 0.1 else 1
                self.left[each.samples[0].sample_id] = skew * self.random.randint(1, 4)
            self.most_in_flight = max(self.most_in_flight, len(self.pool.in_flight))
            if self.pool.ready():
                break
            for each in list(self.pool.in_flight.values()):
                self.left[each.samples[0].sample_id] -= 1
                if not self.left[each.samples[0].sample_id]:
                    self.pool.finish(each)
        else:
            raise AssertionError("the pool waits for ever")
        for each in self.pool.take():
            assert each.started is not None
            self.taken.append((j, each.samples[0].sample_id, each.started))


def world(seed: int, *, waits: bool) -> World:
    draw = random.Random(seed)
    batch = draw.randint(1, 6)
    staleness = draw.randint(1, 6)
    workers = draw.choice([1, batch, 3 * batch, (staleness + 1) * batch])
    settings = PoolSettings(batch, staleness, workers, draw.randint(1, 25), waits=waits)
    return World(settings, draw, draw.randint(0, 1), size=draw.choice([1, 1, 2, 5]))


@pytest.mark.parametrize("seed", range(200))
def test_no_group_is_trained_on_too_late_and_none_is_lost(seed: int) -> None:
    w = world(seed, waits=True)
    for j in range(w.settings.num_rollouts):
        w.rollout(j)
    ages = [j - started for j, _, started in w.taken]
    assert max(ages) <= w.settings.max_staleness
    assert w.most_in_flight <= w.settings.workers
    ids = [sample_id for _, sample_id, _ in w.taken]
    assert len(set(ids)) == len(ids) == w.settings.batch * w.settings.num_rollouts
    assert len(w.pool) == 0 and w.next_id == len(ids), "no group starts that no rollout can take"


@pytest.mark.parametrize("seed", range(50))
def test_without_waiting_every_group_is_taken_or_in_the_pool(seed: int) -> None:
    w = world(seed, waits=False)
    for j in range(w.settings.num_rollouts):
        w.rollout(j)
        assert len(w.taken) + len(w.pool) == w.next_id
        assert w.most_in_flight <= w.settings.workers


def test_the_same_world_gives_the_same_order() -> None:
    worlds = [world(7, waits=True) for _ in range(2)]
    for w in worlds:
        for j in range(w.settings.num_rollouts):
            w.rollout(j)
    assert worlds[0].taken == worlds[1].taken


def test_some_groups_outlive_a_rollout_where_the_bound_allows_it() -> None:
    """Otherwise the tests above show nothing."""
    ages = set[int]()
    for seed in range(40):
        w = world(seed, waits=True)
        for j in range(w.settings.num_rollouts):
            w.rollout(j)
        ages |= {j - started for j, _, started in w.taken}
    assert ages >= {0, 1, 2, 3, 4}


def test_it_waits_only_for_what_is_due() -> None:
    pool = EpisodePool(PoolSettings(2, 2, 100, 100))
    assert pool.room(0) == 6
    pool.start(group(i, 0) for i in range(6))
    for i in range(2, 6):
        pool.finish(pool.in_flight[i, i])
    assert pool.ready() and [g.group_id for g in pool.take()] == [2, 3]
    assert pool.ready() and [g.group_id for g in pool.take()] == [4, 5]
    pool.start([group(6, 2, ended=True), group(7, 2, ended=True)])
    assert not pool.ready(), "groups 0 and 1 would be too old one rollout later"
    pool.finish(pool.in_flight[0, 0])
    assert not pool.ready()
    pool.finish(pool.in_flight[1, 1])
    assert pool.ready() and [g.group_id for g in pool.take()] == [0, 1]


def test_it_waits_for_more_than_later_rollouts_can_take() -> None:
    pool = EpisodePool(PoolSettings(2, 2, 100, 100))
    pool.start(group(i, 0) for i in range(6))
    pool.finish(pool.in_flight[4, 4])
    pool.finish(pool.in_flight[5, 5])
    assert pool.ready(), "four are left for the two rollouts behind this one"
    pool.take()
    pool.start([group(6, 1, ended=True), group(7, 1, ended=True)])
    assert not pool.ready(), "rollout 2 cannot take all four"
    pool.finish(pool.in_flight[0, 0])
    assert not pool.ready()
    pool.finish(pool.in_flight[1, 1])
    assert pool.ready()


def test_a_checkpoint_of_a_run_with_a_wider_bound_is_admitted_as_far_as_it_fits() -> None:
    saved = [group(i, start) for i, start in enumerate((0, 3, 4, 4, 4, 5, 5, 5))]
    pool = EpisodePool(PoolSettings(2, 1, 100, 100))
    pool.next_rollout = 5
    assert [g.group_id for g in pool.admit(saved)] == [0, 1, 4, 7]
    assert [g.group_id for g in pool.in_flight.values()] == [2, 3, 5, 6]
    without = EpisodePool(PoolSettings(2, 1, 100, 100, waits=False))
    without.next_rollout = 5
    assert without.admit(saved) == []
