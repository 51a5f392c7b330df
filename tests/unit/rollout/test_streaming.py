"""Rollouts that are collected request by request, from an engine whose slow responses end when they
are aborted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from arguments.parse import parse_args
from slime_like.data.group_buffer import GroupBuffer
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.collector import Collected, Collector, decide_locally
from slime_like.rollout.hooks import group_filters
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.streaming import Responder, RewardExecutor, StreamGeneration
from slime_like.types import Sample, SampleStatus
from tests.unit.command_lines import complete
from tests.unit.rollout.test_collector import Letters, Prompts

LENGTH = 6


class Served:
    """An engine: responses of LENGTH tokens, of which slow ones bring two and then wait."""

    serves_all_ranks, weight_version = True, 1

    def __init__(self, slow: Callable[[int], bool]) -> None:
        self.slow = slow
        self.requests: list[GenerateRequest] = []
        self.aborts: dict[int, asyncio.Event] = {}
        self.left = 0

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.requests.append(request)
        count, reason = sampling.max_new_tokens, "length"
        if self.slow(request.sample_id):
            self.aborts[request.sample_id] = asyncio.Event()
            await self.aborts[request.sample_id].wait()
            count, reason = 2, "abort"
        tokens = tuple(65 + (request.seed + i) % 26 for i in range(count))
        version = (self.weight_version,) * count
        return GenerateOutput(
            request.sample_id, tokens, (-0.5,) * count, cast(Any, reason), version
        )

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        for event in self.aborts.values():
            event.set()

    async def leave_loop(self) -> None:
        self.left += 1


class Grades:
    """A reward for each finished sample: its id."""

    args = SimpleNamespace(group_rm=False)

    def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, reward=float(sample.sample_id)) for sample in samples]


class World:
    """A collector of rollouts of 2 groups of 2 samples: group g has the samples 2g and 2g + 1."""

    def __init__(self, folder: Path, engine: Served, *flags: str) -> None:
        words = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
        words += ("--rollout-max-response-len", str(LENGTH))
        config = parse_args(complete(folder, *words, *flags, without=words[::2]), 1)
        self.buffer = GroupBuffer(Prompts(), 2)
        sampling = training_sampling(config.rollout)
        rollouter = Rollouter(cast(Any, engine), cast(Any, Grades()), Letters(), seed=3)
        self.responder = Responder(rollouter, engine, sampling)
        filters = group_filters(config)
        self.collector = Collector(
            config.scheduling,
            config.rollout,
            rollouter,
            self.buffer,
            sampling,
            filters,
            max_failed=config.guards.max_failed_samples,
        )

    def collect(self, rollout_id: int, time_limit_s: float | None = None) -> Collected:
        with StreamGeneration(self.responder, time_limit_s) as generation:
            return self.collector.collect_from(generation, rollout_id, decide_locally)


def test_a_cancelled_reward_takes_no_other_with_it() -> None:
    """A sample's task ends while its reward waits in a batch with others."""
    executor = RewardExecutor()
    begun = threading.Event()
    go_on = threading.Event()

    class Slow(Grades):
        def grade(self, samples: Sequence[Sample]) -> list[Sample]:
            begun.set()
            assert go_on.wait(60)
            return super().grade(samples)

    grader = cast(Any, Slow())
    sample = Sample(
        group_id=0, sample_id=7, tokens=torch.tensor([1, 2]), response_length=1,
        loss_mask=torch.ones(1, dtype=torch.bool), text="", response="",
    )  # fmt: skip
    first = executor.submit([sample], grader)
    assert begun.wait(60)
    gone = executor.submit([sample], grader)
    waits = executor.submit([sample], grader)
    assert gone.cancel()
    go_on.set()
    assert [each.result(60)[0].reward for each in (first, waits)] == [7.0, 7.0]


OVER = ("--over-sampling-batch-size", "3", "--partial-rollout")


def test_stragglers_wait_for_the_next_rollout(tmp_path: Path) -> None:
    engine = Served(lambda i: i == 0)
    world = World(tmp_path, engine, *OVER)
    first = world.collect(0)
    assert [g.group_id for g in first.groups] == [1, 2] == [p.group_id for p in first.prompts]
    assert [s.reward for g in first.groups for s in g.samples] == [2, 3, 4, 5]
    (waiting,) = world.buffer.waiting
    cut, finished = waiting.samples
    assert (cut.status, cut.response_length) == (SampleStatus.PARTIAL, 2)
    assert (finished.status, finished.reward) == (SampleStatus.TRUNCATED, 1)
    assert cut.metadata["start_rollout_id"] == 0
    assert first.metrics["rollout/groups_waiting"] == 1 and engine.left == 1
    engine.slow, engine.weight_version = lambda i: False, 2
    engine.requests.clear()
    second = world.collect(1)
    resumed = second.groups[0].samples[0]
    assert resumed.sample_id == 0 and resumed.weight_versions == (1, 1, 2, 2, 2, 2)
    assert resumed.tokens[:4].equal(cut.tokens) and resumed.loss_mask.all()
    asked = next(r for r in engine.requests if r.sample_id == 0)
    assert list(asked.prompt_tokens) == cut.tokens.tolist(), "it continues where it was cut"
    assert 1 not in {r.sample_id for r in engine.requests}, "a finished sample is not asked again"


def test_a_group_too_many_waits_or_is_lost(tmp_path: Path) -> None:
    world = World(tmp_path, Served(lambda i: False), *OVER)
    found = world.collect(0)
    assert len(found.groups) == 2 and found.metrics["rollout/wasted_tokens"] == 0
    (waiting,) = world.buffer.waiting
    assert waiting.ended and [s.reward for s in waiting.samples] == [4, 5]
    world = World(tmp_path, Served(lambda i: False), *OVER[:2])
    found = world.collect(0)
    lost = found.metrics["rollout/groups_surplus"] + found.metrics["rollout/groups_lost"]
    assert lost == 1 and found.metrics["rollout/wasted_tokens"] == 2 * LENGTH
    assert not world.buffer.waiting


def test_a_rollout_out_of_time_takes_what_there_is(tmp_path: Path) -> None:
    world = World(tmp_path, Served(lambda i: i == 3))
    found = world.collect(0, time_limit_s=0.5)
    late = found.groups[1].samples[1]
    assert (late.status, late.response_length, late.reward) == (SampleStatus.TRUNCATED, 2, 3)
    assert late.loss_mask.all() and found.groups[1].samples[0].response_length == LENGTH


def test_an_error_leaves_no_request_behind(tmp_path: Path) -> None:
    engine = Served(lambda i: i == 0)
    world = World(tmp_path, engine, *OVER)

    def broken(samples: Sequence[Sample]) -> Any:
        raise ValueError("the filter is broken")

    world.collector.filters = replace(world.collector.filters, keep_group=broken)
    with pytest.raises(ValueError, match="the filter is broken"):
        world.collect(0)
    assert engine.aborts[0].is_set() and engine.left == 1
