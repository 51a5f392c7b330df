"""What ranks exchange of samples: rows of an index, and tensors as bytes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_like.batching.delivery import CHOICES, without_tensors
from slime_like.samples.episodes import complete
from slime_like.samples.index import (
    ROW,
    RemoteSample,
    count_versions,
    remote_samples,
    rows_of,
    untrained,
)
from slime_like.samples.masking import mask_failed
from slime_like.samples.payload import (
    pack_payload,
    pack_texts,
    payload_size,
    unpack_payload,
    with_texts,
)
from slime_like.types import GREEDY_REWARD, NOT_SAMPLED, OPTIONAL_TENSORS, Sample, SampleStatus

KNOWN = (
    *("sample_id", "group_id", "total_length", "response_length", "prompt_length"),
    *("active_tokens", "greedy_reward", "status", "ended", "version_counts", "versions_length"),
)
TRAVELS = ("tokens", "loss_mask", *OPTIONAL_TENSORS)


def made(rng: random.Random, sample_id: int) -> Sample:
    """A sample of any shape: without a response, without some tensors, of several weights."""
    prompt, length = rng.randrange(1, 6), rng.choice([0, 1, 2, 7, 40])
    maybe: dict[str, Any] = {
        "rollout_log_probs": -torch.rand(length),
        "teacher_log_probs": -torch.rand(length),
        "token_rewards": torch.rand(length, dtype=torch.float64),
        "sampling_mask": torch.randint(-1, 90, (length, rng.randrange(1, 4)), dtype=torch.int32),
        "teacher_prompt": torch.randint(0, 151_000, (rng.randrange(1, 9),), dtype=torch.int32),
        "routed_experts": torch.randint(-1, 8, (prompt + length, 3, 2), dtype=torch.int16),
    }
    width = rng.randrange(1, 9)
    shape = (max(0, prompt + length - width), 3, width)
    maybe["indexer_topk"] = torch.randint(-1, 40, shape, dtype=torch.int32)
    versions = [rng.choice([NOT_SAMPLED, 3, 4, 9]) for _ in range(length)]
    weight_versions = rng.choice([(), (5,) * length, tuple(versions), (NOT_SAMPLED,) * length])
    return Sample(
        group_id=sample_id // 4,
        sample_id=sample_id,
        tokens=torch.randint(0, 151_000, (prompt + length,)),
        response_length=length,
        loss_mask=torch.rand(length) > 0.3,
        reward=rng.choice([None, math.nan, 0.1, -math.inf]),
        status=rng.choice(list(SampleStatus)),
        weight_versions=weight_versions,
        text="7 + 1",
        response="\ud800 8",
        label=("8", math.inf),
        metadata=rng.choice([{}, {GREEDY_REWARD: 0.5}, {GREEDY_REWARD: math.nan, "at": {1: 2}}]),
        **{name: value for name, value in maybe.items() if rng.random() > 0.4},
    )


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    torch.manual_seed(0)
    rng = random.Random(0)
    return [made(rng, i) for i in range(300)]


@pytest.fixture(scope="module")
def known(samples: list[Sample]) -> list[RemoteSample]:
    rows, versions = rows_of(samples, holder=3)
    assert count_versions(rows) == len(versions) > 0
    return remote_samples(rows, versions)


def test_other_ranks_know_what_needs_no_tokens(
    samples: list[Sample], known: list[RemoteSample]
) -> None:
    for sample, row in zip(samples, known, strict=True):
        for name in KNOWN:
            assert repr(getattr(row, name)) == repr(getattr(sample, name)) or (
                getattr(row, name) == getattr(sample, name)
            ), name
        assert repr(row.reward) == repr(sample.reward)
        assert [row.has(name) for name in OPTIONAL_TENSORS] == [
            getattr(sample, name) is not None for name in OPTIONAL_TENSORS
        ]
        assert row.holder == 3


def test_a_row_is_small() -> None:
    assert ROW.itemsize <= 200


def test_tensors_arrive_bit_by_bit(samples: list[Sample], known: list[RemoteSample]) -> None:
    for sample, row in zip(samples, known, strict=True):
        payload = pack_payload(sample)
        assert payload.numel() == payload_size(sample) == payload_size(row)
        arrived = unpack_payload(row, payload)
        for name in TRAVELS:
            left, right = getattr(arrived, name), getattr(sample, name)
            assert (left is None) == (right is None), name
            assert left is None or (left.dtype == right.dtype and torch.equal(left, right)), name
        assert arrived.weight_versions == sample.weight_versions
        assert (arrived.sample_id, arrived.group_id) == (sample.sample_id, sample.group_id)
        assert arrived.response == "" and set(arrived.metadata) <= {GREEDY_REWARD}


def test_text_travels_where_it_is_asked_for(samples: list[Sample]) -> None:
    bare = replace(samples[0], text="", response="", label=None, metadata={})
    full = with_texts(bare, pack_texts(samples[0]))
    names = ("text", "response", "label", "metadata")
    found, given = ([repr(getattr(s, n)) for n in names] for s in (full, samples[0]))
    assert found == given  # a NaN is as it was


def test_changes_on_all_ranks_alike(samples: list[Sample], known: list[RemoteSample]) -> None:
    """Failed ones, those that a filter removes, and choices that nobody replays."""
    for local, known_sample in zip(samples, known, strict=True):
        assert untrained(local).active_tokens == untrained(known_sample).active_tokens == 0
        masked, remote = mask_failed(local), mask_failed(known_sample)
        assert masked.active_tokens == remote.active_tokens
        assert repr(masked.reward) == repr(remote.reward)
        bare = without_tensors([local, known_sample], CHOICES)
        assert payload_size(bare[0]) == payload_size(bare[1])
        assert not any(bare[1].has(name) for name in CHOICES)
        one = without_tensors([local, known_sample], ["indexer_topk"])
        assert payload_size(one[0]) == payload_size(one[1])
        assert one[1].has("routed_experts") == local.has("routed_experts")


def test_a_remote_sample_is_not_taken_for_a_whole_one(
    samples: list[Sample], known: list[RemoteSample]
) -> None:
    assert complete(samples) == samples
    with pytest.raises(AssertionError, match="another rank"):
        complete([samples[0], known[1]])
