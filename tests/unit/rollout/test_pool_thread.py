"""Rollouts of a pool whose episodes run in a thread, from an engine that answers token by token
until it is aborted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from arguments.parse import parse_args
from slime_like.data.group_buffer import GroupBuffer
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.errors import RunError
from slime_like.rollout.collector import Collected
from slime_like.rollout.episode import CustomGenerate, Episode, Model, play_episode
from slime_like.rollout.group_rows import waiting_from_rows, waiting_to_rows
from slime_like.rollout.hooks import group_filters
from slime_like.rollout.pool_collector import PoolCollector
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.samples.episodes import complete
from slime_like.trainer.sampling_factory import pool_settings
from slime_like.types import Sample
from tests.unit.command_lines import complete as complete_flags
from tests.unit.rollout.test_collector import Letters, Prompts
from tests.unit.rollout.test_pool_collector import SINGLE, ids, sample_ids
from tests.unit.rollout.test_streaming import Grades

LENGTH = 6
TOKEN_S = 0.002


class Tokens:
    """Every token takes TOKEN_S, and of slow samples it waits for `release`."""

    serves_all_ranks = True

    def __init__(self, slow: Callable[[int], bool] = lambda i: False) -> None:
        self.slow = slow
        self.weight_version = 1
        self.requests: list[GenerateRequest] = []
        self.release = threading.Event()
        self.running = 0
        self.left = 0
        self._aborted: set[int] = set()
        self._alive: set[int] = set()

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.requests.append(request)
        number = len(self.requests)
        self._alive.add(number)
        self.running += 1
        tokens: list[int] = []
        versions: list[int] = []
        try:
            while len(tokens) < sampling.max_new_tokens and number not in self._aborted:
                await asyncio.sleep(TOKEN_S)
                if len(tokens) == 2 and self.slow(request.sample_id) and not self.release.is_set():
                    continue
                tokens.append(65 + (request.seed + len(tokens)) % 26)
                versions.append(self.weight_version)
        finally:
            self.running -= 1
            self._alive.discard(number)
        reason = "length" if len(tokens) == sampling.max_new_tokens else "abort"
        count = len(tokens)
        return GenerateOutput(
            request.sample_id, tuple(tokens), (-0.5,) * count, cast(Any, reason), tuple(versions)
        )

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        self._aborted |= self._alive

    async def leave_loop(self) -> None:
        self.left += 1


class World:
    """Rollouts of 2 groups of 2 samples: group g has the samples 2g and 2g + 1."""

    def __init__(
        self,
        folder: Path,
        engine: Tokens,
        *flags: str,
        custom: Any = None,
        grades: Grades | None = None,
        hook: Any = None,
    ) -> None:
        words = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "9")
        words += ("--rollout-max-response-len", str(LENGTH))
        words += ("--async-rollout", "--fully-async")
        named = [word for word in words if word.startswith("--") and not word.endswith("async")]
        config = parse_args(complete_flags(folder, *words, *flags, without=tuple(named)), 1)
        self.source = Prompts()
        self.engine = engine
        self.buffer = GroupBuffer(self.source, 2)
        rollouter = Rollouter(
            cast(Any, engine),
            cast(Any, grades or Grades()),
            Letters(),
            seed=3,
            custom_generate=custom,
            sample_hook=hook,
        )
        self.collector = PoolCollector(
            pool_settings(config, 9),
            config.scheduling,
            config.rollout,
            rollouter,
            self.buffer,
            training_sampling(config.rollout),
            group_filters(config),
            max_failed=config.guards.max_failed_samples,
            streams=True,
        )

    def step(self, j: int) -> Collected:
        clock = max(0, j - 1)
        self.engine.weight_version = clock + 1
        self.collector.advance(clock, self.engine.weight_version)
        return self.collector.collect(j)


@pytest.fixture
def open_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(engine: Tokens, *flags: str, **more: Any) -> World:
        worlds.append(World(tmp_path, engine, *flags, **more))
        return worlds[-1]

    yield make
    for world in worlds:
        world.collector.close()


def samples_of(found: Collected) -> list[Sample]:
    return complete(s for group in found.groups for s in group.samples)


def test_episodes_go_on_between_two_rollouts(open_world: Callable[..., World]) -> None:
    engine = Tokens()
    world = open_world(engine)
    world.step(0)
    deadline = time.monotonic() + 20
    while len(world.collector.pool.finished) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(world.collector.pool.finished) >= 6, "nobody collects, and the pool fills up"
    assert world.collector.pool.room(0) == 0, "and starts no more than it may"
    found = world.step(1)
    assert found.metrics["perf/pool_wait_s"] > 0 and found.metrics["rollout/group_age_max"] == 1
    assert 0 <= found.metrics["perf/engine_idle_frac"] <= 1


def test_a_straggler_costs_nobody_anything(open_world: Callable[..., World]) -> None:
    engine = Tokens(lambda i: i == 0)
    world = open_world(engine, "--max-staleness", "5")
    found = [world.step(j) for j in range(4)]
    assert all(0 not in ids(each) for each in found)
    engine.release.set()
    found += [world.step(j) for j in range(4, 7)]
    (taken,) = [each for each in found if 0 in ids(each)]
    straggler = samples_of(taken)[0]
    assert len(set(straggler.weight_versions)) >= 2, "it was updated in the middle"
    assert straggler.response_length == LENGTH and straggler.reward == 0


def test_paused_requests_keep_their_tokens_and_continue(open_world: Callable[..., World]) -> None:
    engine = Tokens(lambda i: i < 2)
    world = open_world(engine, "--max-staleness", "4")
    world.step(0)
    world.collector.pause()
    assert engine.running == 0 and engine.left >= 1
    before = len(engine.requests)
    _, groups = world.collector.position()
    assert len(engine.requests) == before and len(groups) == len(world.collector.pool)
    (slow,) = [group for group in groups if group.group_id == 0]
    assert [s.response_length for s in complete(slow.samples)] == [2, 2]
    assert not any(s.ended for s in slow.samples)
    engine.release.set()
    found = [world.step(j) for j in range(1, 5)]
    (group,) = [g for each in found for g in each.groups if g.group_id == 0]
    for now, then in zip(complete(group.samples), complete(slow.samples), strict=True):
        assert now.tokens[: then.total_length].equal(then.tokens)
        assert now.response_length == LENGTH and now.weight_versions[:2] == then.weight_versions
    resumed = [r for r in engine.requests[before:] if r.sample_id in (0, 1)]
    assert [len(r.prompt_tokens) for r in resumed] == [4, 4], "prompt and two tokens"


@pytest.mark.parametrize("unit", [(), SINGLE], ids=["groups", "samples"])
def test_a_resumed_pool_loses_no_sample_and_trains_on_none_twice(
    open_world: Callable[..., World], unit: tuple[str, ...]
) -> None:
    engine = Tokens(lambda i: i % 5 == 0)
    world = open_world(engine, "--max-staleness", "4", *unit)
    seen = [i for j in range(3) for i in sample_ids(world.step(j))]
    assert (1 in seen) == bool(unit), "without its slow sibling"
    world.collector.pause()
    data, groups = world.collector.position()
    holders = [0] * sum(len(group.samples) for group in groups)
    rows = json.loads(json.dumps(waiting_to_rows(groups, holders), allow_nan=False))
    world.collector.close()
    engine = Tokens()
    resumed = open_world(engine, "--max-staleness", "4", *unit)
    resumed.source.next_id = cast(int, data["next"])
    resumed.buffer.waiting = waiting_from_rows(rows, rank=0, num_holders=1)
    seen += [i for j in range(3, 9) for i in sample_ids(resumed.step(j))]
    assert sorted(seen) == list(range(36))


class Ending(Tokens):
    """Its slow responses end by themselves as the abort arrives."""

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        self.release.set()


class GroupGrades(Grades):
    args = SimpleNamespace(group_rm=True)

    def grade_groups(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        return [self.grade(group) for group in groups]


@pytest.mark.parametrize("grades", [Grades(), GroupGrades()], ids=["samples", "group_rm"])
def test_a_response_that_ends_in_a_pause_is_graded_after_the_resume(
    open_world: Callable[..., World], grades: Grades
) -> None:
    """It is neither sampled again nor trained on without its reward."""
    world = open_world(Ending(lambda i: i < 2), "--max-staleness", "4", grades=grades)
    world.step(0)
    world.collector.pause()
    data, groups = world.collector.position()
    (slow,) = [group for group in groups if group.group_id == 0]
    assert [(s.response_length, s.reward) for s in slow.samples] == [(LENGTH, None)] * 2
    rows = json.loads(json.dumps(waiting_to_rows(groups, [0] * 2 * len(groups)), allow_nan=False))
    world.collector.close()
    engine = Tokens()
    resumed = open_world(engine, "--max-staleness", "4", grades=grades)
    resumed.source.next_id = cast(int, data["next"])
    resumed.buffer.waiting = waiting_from_rows(rows, rank=0, num_holders=1)
    found = [resumed.step(j) for j in range(1, 5)]
    assert not any(request.sample_id < 2 for request in engine.requests)
    (group,) = [g for each in found for g in each.groups if g.group_id == 0]
    assert [sample.reward for sample in group.samples] == [0.0, 1.0]


def test_a_checkpoint_waits_for_the_hooks_of_samples(open_world: Callable[..., World]) -> None:
    """In a hook a sample is no request, and has not ended."""
    begun = threading.Event()

    async def hook(sample: Sample, *more: Any) -> Sample:
        if sample.sample_id == 0:
            begun.set()
            await asyncio.sleep(0.3)
        return replace(sample, metadata={"hook": True})

    world = open_world(Tokens(), "--max-staleness", "4", hook=hook)
    world.collector.advance(0, 1)
    collecting = threading.Thread(target=world.collector.collect, args=(0,))
    collecting.start()
    assert begun.wait(60)
    collecting.join()  # of other groups
    world.collector.pause()
    _, groups = world.collector.position()
    stored = [s for group in groups for s in complete(group.samples) if s.sample_id == 0]
    assert [(s.response_length, s.metadata) for s in stored] == [(LENGTH, {"hook": True})]


def test_episodes_of_a_function_wait_with_their_requests(open_world: Callable[..., World]) -> None:
    """They keep their place in the program; in a checkpoint they start again."""
    inside = threading.Event()

    async def play(model: Model, episode: Episode) -> None:
        for _ in range(3):
            await model.write(episode, max_new_tokens=2)
            inside.set()

    custom = CustomGenerate("--custom", play_episode(play), timeout_s=60)
    engine = Tokens()
    world = open_world(engine, custom=custom)
    world.step(0)
    world.collector.pause()
    assert inside.is_set() and engine.running == 0
    _, groups = world.collector.position()
    assert all(s.ended or not s.response_length for g in groups for s in g.samples)
    found = world.step(1)
    assert all(s.response_length == LENGTH for s in samples_of(found))


def test_an_error_of_an_episode_ends_the_rollout(open_world: Callable[..., World]) -> None:
    class Broken(Tokens):
        async def generate_one(
            self, request: GenerateRequest, sampling: SamplingParams
        ) -> GenerateOutput:
            if len(self.requests) == 9:
                raise RuntimeError("the engine is gone")
            return await super().generate_one(request, sampling)

    world = open_world(Broken())
    with pytest.raises(RunError, match="RuntimeError: the engine is gone"):
        _ = [world.step(j) for j in range(9)]


def test_close_aborts_what_is_left(open_world: Callable[..., World]) -> None:
    engine = Tokens(lambda i: i > 3)
    world = open_world(engine)
    world.step(0)
    assert engine.running > 0
    world.collector.close()
    assert engine.running == 0 and engine.left >= 1
    assert not any(t.name == "episodes" and t.is_alive() for t in threading.enumerate())
    world.collector.close()
