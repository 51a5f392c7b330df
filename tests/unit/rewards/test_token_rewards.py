"""Rewards of tokens: what a reward function may return, and what is trained on."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from slime_like.advantages import (
    AdvantageSettings,
    Outcomes,
    advantage_estimators,
    estimate_advantages,
    takes_token_rewards,
)
from slime_like.batching.outcomes import outcomes_of
from slime_like.rewards.grader import Grader
from slime_like.rewards.worker_protocol import to_answer
from slime_like.rollout.recording import check_values, load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import remote_samples, rows_of
from slime_like.samples.payload import pack_payload, unpack_payload
from slime_like.types import ANSWER_REWARDS, Sample

GAMMA, LAMBDA, KL_COEF = 0.9, 0.8, 0.3


def sample(sample_id: int, mask: str, **fields: object) -> Sample:
    """mask: a character by response token, 1 where the model wrote it."""
    active = torch.tensor([c == "1" for c in mask], dtype=torch.bool)
    made = Sample(
        group_id=sample_id // 2,
        sample_id=sample_id,
        tokens=torch.arange(2 + len(mask)),
        response_length=len(mask),
        loss_mask=active,
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_a_row_of_numbers_is_one_for_each_token():
    row = {"value": 0.75, "tokens": [0.25, 0.0, 0.5]}
    for value in ([0.25, 0, 0.5], (0.25, 0.0, 0.5), numpy.array([0.25, 0, 0.5])):
        assert to_answer(value, None) == row
    assert to_answer(torch.tensor([0.25, 0, 0.5]), None) == row
    assert to_answer([], None) == {"value": 0, "tokens": []}


def test_a_dict_may_hold_both():
    value = {"score": 2, "token_rewards": [0.5, 0.25], "right": 1.0}
    assert to_answer(value, None) == {
        "value": 2.0,
        "tokens": [0.5, 0.25],
        "details": {"right": 1.0},
    }
    assert to_answer(value, "right")["value"] == 1.0
    assert to_answer({"token_rewards": [0.5, 0.25]}, None)["value"] == 0.75
    assert to_answer({"token_rewards": [0.5], "score": torch.tensor(3.0)}, None)["value"] == 3.0


def test_a_key_that_was_asked_for_must_be_there():
    assert "wrong_type" in to_answer({"token_rewards": [0.5]}, "right")


def test_other_ranks_get_them():
    rewards = torch.tensor([0.1, -0.2], dtype=torch.float64)
    for given in (rewards, None):
        own = sample(0, "11", reward=-0.1, token_rewards=given)
        (known,) = remote_samples(*rows_of([own], 0))
        arrived = unpack_payload(known, pack_payload(own)).token_rewards
        assert arrived is None if given is None else torch.equal(arrived, given)


@pytest.mark.parametrize(
    "value", [["a"], {"token_rewards": 0.5}, {"token_rewards": [[0.5]]}, numpy.zeros((2, 2))]
)
def test_other_things_are_named(value):
    assert "wrong_type" in to_answer(value, None)


def grader(tmp_path: Path, body: str, **settings: object) -> Grader:
    path = tmp_path / "own.py"
    path.write_text(f"def reward(args, sample):\n    return {body}\n")
    return Grader(custom_rm_path=f"{path}:reward", rm_num_workers=1, **settings)  # type: ignore[arg-type]


def test_the_grader_keeps_them(tmp_path):
    with grader(tmp_path, "[0.5] * sample.response_length") as ours:
        graded = ours.grade([sample(0, "111"), sample(1, "")])
    assert [s.reward for s in graded] == [1.5, 0.0]
    assert [s.token_rewards.tolist() for s in graded] == [[0.5, 0.5, 0.5], []]


def test_those_of_a_long_response_are_taken_up_to_a_limit(tmp_path, monkeypatch):
    """100,000 numbers of 18 digits; what is too large is named, and the next sample is graded."""
    with grader(tmp_path, "[0.1234567890123456] * sample.response_length") as ours:
        (graded,) = ours.grade([sample(0, "1" * 100_000)])
        assert graded.token_rewards.tolist() == [0.1234567890123456] * 100_000
    monkeypatch.setattr("slime_like.rewards.pool._MAX_OWN_ANSWER", 1000)
    with grader(tmp_path, "[0.1234567890123456] * sample.response_length") as ours:
        failed, graded = ours.grade([sample(0, "1" * 100), sample(1, "1")])
    assert "an answer of 2" in failed.metadata["failure"] and "more than 1000" in ours.last_failure
    assert failed.reward is None and graded.reward == 0.1234567890123456


def test_their_sum_is_trained_on_where_that_is_asked_for(tmp_path):
    body = "{'score': 7, 'token_rewards': [0.5] * sample.response_length}"
    with grader(tmp_path, body, sum_token_rewards=True) as ours:
        (graded,) = ours.grade([sample(0, "111")])
    assert (graded.reward, graded.token_rewards) == (1.5, None)


def test_rewards_of_an_agents_answers_are_added_to_their_sum_alone(tmp_path):
    mine = sample(0, "111", metadata={ANSWER_REWARDS: 2.0})
    body = "[0.5] * sample.response_length"
    with grader(tmp_path, body, sum_token_rewards=True) as ours:
        assert ours.grade([mine])[0].reward == 3.5
    with grader(tmp_path, body) as ours, pytest.raises(ValueError, match=r"sample 0: .* --sum-tok"):
        ours.grade([mine])


def test_a_wrong_number_of_them_is_an_error(tmp_path):
    message = r"sample 4: .*2 numbers for a response of 3 tokens"
    with grader(tmp_path, "[0.5, 0.5]") as ours, pytest.raises(ValueError, match=message):
        ours.grade([sample(4, "111")])


def test_one_that_is_too_large_is_an_error(tmp_path):
    message = r"2e\+06 is beyond --max-abs-reward"
    with grader(tmp_path, "[2e6, -2e6]") as ours, pytest.raises(ValueError, match=message):
        ours.grade([sample(0, "11")])


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_one_that_is_not_finite_leaves_the_sample_out(tmp_path, bad):
    body = f"{{'score': 1.0, 'token_rewards': [float('{bad}'), 0.5]}}"
    with grader(tmp_path, body) as ours:
        (graded,) = ours.grade([sample(0, "11")])
        assert ours.last_counts["nonfinite"] == 1
    assert math.isnan(graded.reward) and graded.token_rewards is None


def given(masks: list[Tensor]) -> list[Tensor | None]:
    """Rewards of tokens, of all samples but the second and the last."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(m.numel(), generator=generator, dtype=torch.float64) for m in masks]
    return [None if i in (1, len(masks) - 1) else row for i, row in enumerate(rows)]


def loop(
    rewards: list[Tensor | None],
    outcomes: list[float],
    masks: list[Tensor],
    kl: list[Tensor],
    values: list[Tensor] | None,
) -> list[list[float]]:
    """Advantages before whitening, one token at a time; what is not active stays 0. A reward of a
    token that is not active is that of the last active token before it."""
    expected = []
    for of_tokens, outcome, mask, penalty, value in zip(
        rewards, outcomes, masks, kl, values or [None] * len(masks)
    ):
        active = [t for t in range(mask.numel()) if mask[t]]
        result = [0.0] * mask.numel()
        advantage = following = 0.0
        for place in reversed(range(len(active))):
            start = active[place]
            end = active[place + 1] if place + 1 < len(active) else mask.numel()
            reward = -KL_COEF * float(penalty[start])
            if of_tokens is not None:
                reward += float(of_tokens[start:end].sum())
            elif place + 1 == len(active):
                reward += outcome
            if value is None:
                advantage = reward + GAMMA * advantage
            else:
                delta = reward + GAMMA * following - float(value[start])
                advantage = delta + GAMMA * LAMBDA * advantage
                following = float(value[start])
            result[start] = advantage
        expected.append(result)
    return expected


MASKS = ["111", "1011", "0110011", "1", "", "000", "110"]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_estimators_against_a_loop(estimator):
    generator = torch.Generator().manual_seed(5)
    masks = [torch.tensor([c == "1" for c in mask], dtype=torch.bool) for mask in MASKS]
    row = lambda m: torch.randn(m.numel(), generator=generator, dtype=torch.float64)  # noqa: E731
    kl, values = [torch.where(m, row(m), 0.0) for m in masks], [row(m).float() for m in masks]
    rewards, numbers = given(masks), [float(i) for i in range(len(masks))]
    outcomes = Outcomes(
        rewards=torch.tensor(numbers, dtype=torch.float64),
        group_ids=torch.arange(len(masks)),
        lengths=torch.tensor([int(m.sum()) for m in masks]),
        token_rewards=rewards,
    )
    output = estimate_advantages(
        AdvantageSettings(estimator, gamma=GAMMA, lambd=LAMBDA, kl_coef=KL_COEF),
        outcomes,
        local_indices=range(len(masks)),
        masks=masks,
        kl=kl,
        critic_values=values if estimator == "ppo" else None,
    )
    expected = loop(rewards, numbers, masks, kl, values if estimator == "ppo" else None)
    for got, want in zip(output.values, expected, strict=True):
        torch.testing.assert_close(got.double(), torch.tensor(want).double(), rtol=0, atol=1e-6)
    if estimator == "ppo":
        assert output.returns is not None
        for returns, want, value, mask in zip(output.returns, expected, values, masks):
            target = torch.where(mask, torch.tensor(want).double() + value.double(), 0.0)
            torch.testing.assert_close(returns.double(), target, rtol=0, atol=1e-6)


def test_a_sample_without_a_finite_reward_gets_nothing():
    samples = [
        sample(0, "11", reward=math.nan),
        sample(1, "11", reward=1.0, token_rewards=torch.tensor([0.25, 0.75], dtype=torch.float64)),
    ]
    output = estimate_advantages(
        AdvantageSettings("reinforce_plus_plus"),
        outcomes_of(samples),
        local_indices=[0, 1],
        masks=[s.loss_mask for s in samples],
    )
    assert [v.tolist() for v in output.values] == [[0, 0], [1.0, 0.75]]


@pytest.mark.parametrize(
    "estimator", [n for n, e in advantage_estimators.items() if not takes_token_rewards(e)]
)
def test_other_estimators_refuse_them(estimator):
    samples = [sample(i, "11", reward=1.0, token_rewards=torch.ones(2).double()) for i in range(2)]
    with pytest.raises(
        ValueError, match=f"{estimator} takes one reward per response.*--sum-token-r"
    ):
        estimate_advantages(
            AdvantageSettings(estimator),
            outcomes_of(samples),
            local_indices=[0, 1],
            masks=[s.loss_mask for s in samples],
        )


def test_a_recorded_rollout_keeps_them(tmp_path):
    rewards = torch.tensor([0.1, -0.2, 1e-17], dtype=torch.float64)
    groups = [SampleGroup(0, (sample(0, "101", reward=-0.1, token_rewards=rewards),))]
    save_rollout(str(tmp_path / "{rollout_id}"), 0, groups)
    loaded = load_rollout(str(tmp_path / "{rollout_id}"), 0)
    check_values(loaded, vocab_size=64)
    assert torch.equal(loaded[0].samples[0].token_rewards, rewards)
    (first,) = complete(loaded[0].samples)
    short = dataclasses.replace(first, token_rewards=rewards[:2])
    with pytest.raises(ValueError, match="2 rewards of 3 tokens"):
        check_values([SampleGroup(0, (short,))], vocab_size=64)
