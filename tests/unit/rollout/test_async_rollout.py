"""Rollouts sampled ahead, in a checkpoint: the resumed queue hands out the same groups, bit by
bit."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime_like.errors import RunError
from slime_like.rollout.async_rollout import AsyncRolloutQueue
from slime_like.rollout.generated import GeneratedRollout
from slime_like.rollout.metrics import check_staleness
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus


def sample(step: int, i: int, **changes: Any) -> Sample:
    generator = torch.Generator().manual_seed(10 * step + i)
    values: dict[str, Any] = dict(
        group_id=step,
        sample_id=10 * step + i,
        tokens=torch.randint(0, 9, (5,), generator=generator),
        response_length=3,
        loss_mask=torch.tensor([True, False, True]),
        rollout_log_probs=-torch.rand(3, generator=generator),
        teacher_log_probs=-torch.rand(3, generator=generator) if i else None,
        reward=math.nan if i else 1 / 3,
        status=SampleStatus.TRUNCATED,
        weight_versions=(step, step, step + 1),
        text="2 + 2 =",
        response="\ud800 4",
        label=("4", i),
        metadata={"x": (1, math.inf)},
    )
    return Sample(**(values | changes))


def world() -> tuple[
    Callable[[int], GeneratedRollout], Callable[[], dict[str, Any]], dict[str, int]
]:
    """make, position, and where sampling is."""
    at = {"data": 0}

    def make(step: int) -> GeneratedRollout:
        at["data"] += 1
        groups = [SampleGroup(step, (sample(step, 0), sample(step, 1)))]
        return GeneratedRollout.of(groups, {"rollout/x": 0.1 * step})

    return make, lambda: dict(at), at


def test_a_rollout_in_flight_is_waited_for() -> None:
    """Its thread may not compute any more when the interpreter ends."""
    begun, may_end = threading.Event(), threading.Event()

    def make(step: int) -> GeneratedRollout:
        if step:
            begun.set()
            may_end.wait(60)
        return GeneratedRollout.of([SampleGroup(step, (sample(step, 0),))], {})

    queue = AsyncRolloutQueue(make, dict, max_ahead=1)
    assert queue.wait(0), "no thread has begun"
    queue.allow(1)
    queue.take(0)
    assert begun.wait(60)
    queue.close()
    assert not queue.wait(0.01)
    may_end.set()
    assert queue.wait(60)


def same(a: GeneratedRollout, b: GeneratedRollout) -> bool:
    """Bit by bit; the seconds of sampling are compared too."""
    fields = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
    for x, y in zip(a.groups, b.groups, strict=True):
        for s, t in zip(x.samples, y.samples, strict=True):
            for name in fields:
                left, right = getattr(s, name), getattr(t, name)
                if (left is None) != (right is None):
                    return False
                if left is not None and not (left.dtype == right.dtype and left.equal(right)):
                    return False
            plain = ("group_id", "sample_id", "status", "weight_versions", "text", "response")
            more = ("label", "metadata", "response_length")
            if any(getattr(s, n) != getattr(t, n) for n in (*plain, *more)):
                return False
            if repr(s.reward) != repr(t.reward):
                return False
    return a.metrics == b.metrics


def test_what_was_sampled_ahead_is_handed_out_after_a_resume() -> None:
    make, position, at = world()
    queue = AsyncRolloutQueue(make, position, max_ahead=2)
    queue.allow(3)
    queue.take(0)
    queue.take(1)
    saved = json.loads(json.dumps(queue.state(), allow_nan=False))
    assert at["data"] == 4 and saved["data"] == 2  # before rollout 2: what older versions read
    assert saved["sampled_ahead"]["behind"] == {"data": 4}
    expected = [queue.take(2), queue.take(3)]
    queue.close()
    make, position, at = world()
    at["data"] = saved["sampled_ahead"]["behind"]["data"]
    resumed = AsyncRolloutQueue(make, position, max_ahead=2)
    resumed.load_ahead(saved["sampled_ahead"], GeneratedRollout.of)
    assert resumed.state() == saved  # saved again before anything was sampled
    resumed.allow(4)
    assert all(same(resumed.take(step), groups) for step, groups in zip((2, 3), expected))
    assert resumed.take(4).groups[0].group_id == 4 and at["data"] == 5  # nothing was sampled again
    assert "sampled_ahead" not in resumed.state()
    resumed.close()


@pytest.mark.parametrize(
    ("versions", "bound", "words"),
    [
        ((5, 5, 5), 0, None),
        ((4, -1, 5), 1, None),  # -1: an environment's
        ((1, 2, 5), None, None),
        ((5, 5, 4), 0, "weight version 4, and the policy being trained has version 5"),
        ((3, 4, 5), 1, "weight version 3, .*at most 1 versions behind"),
        ((5, 5, 999), None, "weight version 999"),
        ((5, 5, 6), 0, "weight version 6"),
    ],
)
def test_versions_that_cannot_be_stop_the_run(
    versions: tuple[int, ...], bound: int | None, words: str | None
) -> None:
    samples = [sample(0, 0, weight_versions=versions)]
    if words is None:
        check_staleness(samples, 5, bound, "the engine")
    else:
        with pytest.raises(RunError, match=words):
            check_staleness(samples, 5, bound, "the engine")
