"""Samples of a prefetched rollout reach the ranks that train on them once, and as they are then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from slime_like.batching.delivery import SampleDelivery
from slime_like.batching.step_plan import StepPlan
from slime_like.samples.index import AnySample
from slime_like.samples.masking import mask_failed
from slime_like.types import Sample, SampleStatus

PLAN = StepPlan(4, 1, 0)


def rollout(first: int = 0) -> list[AnySample]:
    return [
        Sample(
            group_id=0,
            sample_id=first + i,
            tokens=torch.arange(6),
            response_length=3,
            loss_mask=torch.ones(3, dtype=torch.bool),
            reward=1.0,
            status=SampleStatus.TRUNCATED if i == 0 else SampleStatus.COMPLETED,
        )
        for i in range(4)
    ]


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[AnySample]]:
    calls: list[Sequence[AnySample]] = []

    def exchange(
        self: SampleDelivery, samples: Sequence[AnySample], *more: object
    ) -> list[AnySample]:
        calls.append(samples)
        return list(samples)

    monkeypatch.setattr(SampleDelivery, "_exchange", exchange)
    return calls


@pytest.fixture
def delivery(monkeypatch: pytest.MonkeyPatch) -> SampleDelivery:
    monkeypatch.setattr("slime_like.batching.delivery.gather", lambda value: [value])
    return SampleDelivery(None, PLAN, None, replayed=(), buffer_size=1)  # type: ignore[arg-type]


def test_a_prefetched_rollout_is_exchanged_once(
    delivery: SampleDelivery, exchanged: list[Sequence[AnySample]]
) -> None:
    samples = rollout()
    delivery.deliver_early(7, samples, None)
    assert delivery.deliver(samples, PLAN.assign(samples), 7) == samples
    assert len(exchanged) == 1 and not delivery._early


def test_samples_that_were_masked_since_are_exchanged_as_they_are(
    delivery: SampleDelivery, exchanged: list[Sequence[AnySample]]
) -> None:
    """Also if the first one is: nothing of a rollout is kept after its delivery."""
    for rollout_id in range(5):
        samples = rollout(4 * rollout_id)
        delivery.deliver_early(rollout_id, samples, None)
        masked = [
            dataclasses.replace(s, loss_mask=torch.zeros(3, dtype=torch.bool))
            if s.status == SampleStatus.TRUNCATED and isinstance(s, Sample)
            else s
            for s in samples
        ]
        delivered = delivery.deliver(masked, PLAN.assign(masked), rollout_id)
        assert all(a is b for a, b in zip(delivered, masked, strict=True))
        assert not delivery._early
    assert len(exchanged) == 10


def test_failed_samples_are_masked_before_a_rollout_is_delivered() -> None:
    """So the trainer gets the objects that were delivered early."""
    from slime_like.rollout.generated import GeneratedRollout
    from slime_like.samples.groups import SampleGroup

    failed = dataclasses.replace(rollout()[0], status=SampleStatus.ABORTED)  # type: ignore[type-var]
    generated = GeneratedRollout.of([SampleGroup(0, (failed, *rollout(8)))], {})
    assert not generated.samples[0].active_tokens and generated.groups[0].samples[0] is failed
    assert all(mask_failed(s).active_tokens == s.active_tokens for s in generated.samples)
