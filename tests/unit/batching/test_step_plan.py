"""A rollout cut into optimizer steps: the same samples and weights for every number of
data-parallel ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slime_like.batching.delivery import with_routed_experts, with_selected_keys
from slime_like.batching.step_plan import StepPlan
from slime_like.batching.train_samples import map_steps, step_weights, train_samples
from slime_like.losses.reductions import LOSS_REDUCTIONS
from slime_like.samples.masking import check_sampling_masks, mask_failed
from slime_like.types import Sample, SampleStatus


def make(
    sample_id: int, length: int = 3, holes: int = 0, status: SampleStatus = SampleStatus.COMPLETED
) -> Sample:
    mask = torch.ones(length, dtype=torch.bool)
    mask[:holes] = False
    tokens = torch.arange(length + 2) + 100 * sample_id
    return Sample(
        sample_id // 4,
        sample_id,
        tokens,
        length,
        mask,
        torch.zeros(length),
        float(sample_id),
        status,
    )


ROLLOUT = [make(i, length=1 + i % 5, holes=i % 2) for i in range(24)]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_ranks_share_each_step(dp_size: int, reduction: str) -> None:
    """Together the ranks hold what one would, in its order, with its weights."""
    plans = [StepPlan(8, dp_size, rank) for rank in range(dp_size)]
    parts = [
        train_samples(plan, ROLLOUT, reduction=reduction, loss_norm_length=7, micro_batch_size=2)
        for plan in plans
    ]
    full_one = train_samples(
        StepPlan(8, 1, 0), ROLLOUT, reduction=reduction, loss_norm_length=7, micro_batch_size=2
    )
    assert len(full_one) == 3
    for k, step in enumerate(full_one):
        joined = [sample for part in parts for sample in part[k]]
        assert [s.tokens[0].item() for s in joined] == [100 * i for i in range(8 * k, 8 * k + 8)]
        for a, b in zip(joined, step, strict=True):
            assert torch.equal(a.loss_weights, b.loss_weights)
            assert a.loss_weights.shape == (a.response_length,)
    for plan, part in zip(plans, parts, strict=True):
        local = [sample.tokens[0].item() // 100 for step in part for sample in step]
        assert plan.assign(ROLLOUT).local_indices == local


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("rollout_mean", [1 / (4 * 1), 1 / (4 * 1), 1 / (4 * 3), 1 / (4 * 3)]),
        ("sequence_mean", [1 / 4, 1 / 4, 1 / 12, 1 / 12]),
        ("token_mean", [1 / 8] * 4),
        ("seq_mean_token_sum_norm", [1 / 20] * 4),
        ("prompt_mean", [1 / 8] * 4),
    ],
)
def test_weights_of_a_step(reduction: str, expected: list[float]) -> None:
    """Active tokens 1, 1, 3, 3 of one prompt: every sample of this program is a rollout of its
    own."""
    step = [make(0, 1), make(1, 2, 1), make(2, 3), make(3, 4, 1)]
    assert step_weights(step, reduction, 5) == pytest.approx(expected)


def test_aborted_samples_keep_their_place_and_train_nothing() -> None:
    bad = mask_failed(make(1, 3, status=SampleStatus.ABORTED))
    assert not bad.loss_mask.any() and math.isnan(bad.reward or 0.0) and bad.tokens.numel() == 5
    good = make(0, 3)
    assert mask_failed(good) is good
    assert step_weights([good, bad], "sequence_mean", None) == pytest.approx([1 / 6, 1 / 2])


def test_unscored_samples_keep_their_mask_and_every_denominator() -> None:
    good, unscored = make(0, 3), mask_failed(make(1, 3, status=SampleStatus.FAILED))
    assert torch.equal(unscored.loss_mask, make(1, 3).loss_mask) and math.isnan(
        unscored.reward or 0.0
    )
    assert step_weights([good, unscored], "token_mean", None) == step_weights(
        [good, make(1, 3)], "token_mean", None
    )


def test_map_steps_counts_over_all_steps() -> None:
    steps = train_samples(StepPlan(8, 2, 1), ROLLOUT, reduction="token_mean")
    seen: list[int] = []
    batches = map_steps(
        steps,
        lambda i, s: (
            seen.append(i)
            or dataclasses.replace(s, advantages=torch.full((s.response_length,), float(i)))
        ),
    )  # type: ignore[func-returns-value]
    assert seen == list(range(12))
    assert [batch.samples[0].advantages[0].item() for batch in batches] == [0.0, 4.0, 8.0]  # type: ignore[index]


def test_positive_samples_of_the_whole_step_share_their_weight() -> None:
    """VAPO's term: 1 / active tokens of the step's samples with a reward above 0, on every rank
    alike; the raw reward travels too."""
    full_one = train_samples(StepPlan(8, 1, 0), ROLLOUT, reduction="token_mean", positive_nll=True)[
        0
    ]
    positive = [s.reward is not None and s.reward > 0 for s in ROLLOUT[:8]]
    tokens = sum(int(s.loss_mask.sum()) for s, good in zip(ROLLOUT, positive) if good)
    assert any(positive) and not all(positive)
    for sample, source, good in zip(full_one, ROLLOUT, positive):
        assert sample.nll_weights is not None and sample.rewards is not None
        assert sample.nll_weights.tolist() == pytest.approx(
            [1 / tokens if good else 0.0] * source.response_length
        )
        assert sample.rewards.tolist() == [source.reward] * source.response_length
    half = train_samples(StepPlan(8, 2, 1), ROLLOUT, reduction="token_mean", positive_nll=True)[0]
    assert [s.nll_weights.tolist() for s in half] == [s.nll_weights.tolist() for s in full_one[4:]]
    assert (
        train_samples(StepPlan(8, 1, 0), ROLLOUT, reduction="token_mean")[0][0].nll_weights is None
    )


def test_log_probs_of_the_sampler_are_there_for_all_or_for_none() -> None:
    """On every rank alike: a sample that trains nothing does not hide the others', and one that
    trains and has none does."""
    failed = dataclasses.replace(
        make(1, 4), loss_mask=torch.zeros(4, dtype=torch.bool), rollout_log_probs=None, reward=None
    )
    reported = [make(0), failed, make(2), make(3)]
    for rank in range(2):
        (step,) = train_samples(StepPlan(4, 2, rank), reported, reduction="token_mean")
        assert all(
            s.rollout_log_probs is not None and s.rollout_log_probs.shape == (s.response_length,)
            for s in step
        )
        assert all(s.rewards is not None for s in step)
    untold = [make(0), make(1), make(2), dataclasses.replace(make(3), rollout_log_probs=None)]
    for rank in range(2):
        (step,) = train_samples(StepPlan(4, 2, rank), untold, reduction="token_mean")
        assert all(s.rollout_log_probs is None for s in step)


LONG_AND_SHORT = [make(i, length=40 if i % 8 == 0 else 1 + i % 5) for i in range(24)]


@pytest.mark.parametrize("equal_counts", [False, True])
def test_a_cost_changes_who_trains_on_what_and_nothing_else(equal_counts: bool) -> None:
    """Of each step the ranks hold the same samples with the same weights; the rank of the long one
    has the fewer others."""
    plans = [
        StepPlan(8, 2, rank, linear_cost=100.0, equal_counts=equal_counts) for rank in range(2)
    ]
    parts = [train_samples(plan, LONG_AND_SHORT, reduction="token_mean") for plan in plans]
    full_one = train_samples(StepPlan(8, 1, 0), LONG_AND_SHORT, reduction="token_mean")
    for k, step in enumerate(full_one):
        joined = sorted((s for part in parts for s in part[k]), key=lambda s: int(s.tokens[0]))
        for a, b in zip(joined, step, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.loss_weights, b.loss_weights)
        sizes = [len(part[k]) for part in parts]
        assert sizes == [4, 4] if equal_counts else sorted(sizes) == [1, 7]
    for plan, part in zip(plans, parts, strict=True):
        share = plan.assign(LONG_AND_SHORT)
        assert share.local_indices == [s.tokens[0].item() // 100 for step in part for s in step]
        assert share.metrics.keys() == {
            "perf/rank_work_max_over_mean",
            "perf/rank_tokens_max_over_mean",
        }
        tokens = [[sum(s.tokens.numel() for s in part[k]) for part in parts] for k in range(3)]
        expected = sum(max(pair) / (sum(pair) / 2) for pair in tokens) / 3
        assert share.metrics["perf/rank_tokens_max_over_mean"] == pytest.approx(expected)
    assert StepPlan(8, 2, 0).assign(LONG_AND_SHORT).metrics == {}


def test_a_step_need_not_be_divisible_by_the_ranks() -> None:
    positions = [
        StepPlan(8, 3, 0).assign(ROLLOUT).indices_in_step(1),
        *(
            StepPlan(8, 3, r, linear_cost=9.0, equal_counts=False)
            .assign(ROLLOUT)
            .indices_in_step(1)
            for r in range(3)
        ),
    ]
    assert positions[0] == (0, 1)
    assert sorted(i for part in positions[1:] for i in part) == list(range(8)) and all(
        positions[1:]
    )


def test_every_sample_has_routes_of_this_network() -> None:
    reported = dataclasses.replace(make(1), routed_experts=torch.zeros(5, 3, 2, dtype=torch.int16))
    aborted = make(2, status=SampleStatus.ABORTED)
    sizes = dict(layers=3, topk=2, experts=4)
    first, second = with_routed_experts([reported, aborted], **sizes)
    assert first.routed_experts is reported.routed_experts and second.routed_experts is not None
    assert second.routed_experts.shape == (5, 3, 2) and bool((second.routed_experts == -1).all())
    blank = dataclasses.replace(make(5), loss_mask=torch.zeros_like(make(5).loss_mask))
    (third,) = with_routed_experts([blank], **sizes)
    assert isinstance(third, Sample) and third.routed_experts is not None
    assert third.routed_experts.shape == (5, 3, 2), "nothing is trained on"
    check_sampling_masks([blank, mask_failed(aborted)], wanted=True)
    with pytest.raises(ValueError, match="sample 4"):
        check_sampling_masks([make(4)], wanted=True)
    wrong = [
        torch.zeros(4, 3, 2),
        torch.zeros(5, 2, 2),
        torch.full((5, 3, 2), 4),
        torch.full((5, 3, 2), -2),
    ]
    for routed_experts in wrong:
        with pytest.raises(
            ValueError,
            match=r"--use-rollout-routing-replay: .* sample 3 .* expected .* \(5, 3, 2\)",
        ):
            with_routed_experts(
                [dataclasses.replace(make(3), routed_experts=routed_experts.to(torch.int16))],
                **sizes,
            )
    with pytest.raises(ValueError, match="sample 4 has no routed experts"):
        with_routed_experts([make(4)], **sizes)


def test_every_sample_has_keys_that_its_queries_see() -> None:
    """Of five tokens, of which the last three attend to two keys."""
    keys = torch.tensor([[0, 2], [3, 1], [-1, -1]], dtype=torch.int32).unsqueeze(1).repeat(1, 4, 1)
    sizes = dict(indexers=4, width=2)
    reported = dataclasses.replace(make(1), indexer_topk=keys)
    aborted = make(2, status=SampleStatus.ABORTED)
    first, second = with_selected_keys([reported, aborted], **sizes)
    assert first.indexer_topk is keys and second.indexer_topk is not None
    assert second.indexer_topk.shape == (3, 4, 2) and bool((second.indexer_topk == -1).all())
    (near,) = with_selected_keys([make(3)], indexers=4, width=5)  # nothing to choose
    assert near.indexer_topk is not None and near.indexer_topk.shape == (0, 4, 5)
    (again,) = with_selected_keys([near], indexers=4, width=5)
    assert again.indexer_topk is near.indexer_topk
    shorter = torch.empty(0, 4, 9, dtype=torch.int32)
    (again,) = with_selected_keys(
        [dataclasses.replace(make(3), indexer_topk=shorter)], indexers=4, width=9
    )
    assert again.indexer_topk is shorter
    flag = "--use-rollout-indexer-replay: the selected keys of sample 4"
    with pytest.raises(ValueError, match=f"{flag} are missing"):
        with_selected_keys([make(4)], **sizes)
    for wrong in (keys[:2], keys[:, :3], keys.repeat(1, 1, 2)):
        with pytest.raises(ValueError, match=rf"{flag} are .* expected .* = \(3, 4, 2\)"):
            with_selected_keys([dataclasses.replace(make(4), indexer_topk=wrong)], **sizes)
    for row, key in ((0, 3), (1, 4), (2, -2)):  # later tokens, and none
        unseen = keys.clone()
        unseen[row, 2, 1] = key
        with pytest.raises(ValueError, match=f"{flag} are not all positions .* {key}"):
            with_selected_keys([dataclasses.replace(make(4), indexer_topk=unseen)], **sizes)


@pytest.mark.parametrize("cost", [None, 9.0])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_a_rank_gets_whole_pairs(dp_size: int, cost: float | None) -> None:
    plans = [
        StepPlan(8, dp_size, rank, linear_cost=cost, equal_counts=False, samples_together=2)
        for rank in range(dp_size)
    ]
    for k in range(3):
        places = [plan.assign(LONG_AND_SHORT).indices_in_step(k) for plan in plans]
        assert sorted(place for of_rank in places for place in of_rank) == list(range(8))
        for of_rank in places:
            assert len(of_rank) >= 2 and all(place % 2 == 0 for place in of_rank[::2])
            assert [place + 1 for place in of_rank[::2]] == list(of_rank[1::2])
