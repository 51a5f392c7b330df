"""slime's dict of a rollout, as a function of the user's returns it, becomes samples again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_like.batching.turn_credit import TURNS, credit_fields
from slime_like.compat.slime.train_data import read_train_data
from slime_like.types import TRAIN_REWARD, Sample, SampleStatus

NAME = "--custom-convert-samples-to-train-data-path own.convert"
Data = dict[str, Any]


def sample(sample_id: int, *tokens: int, reward: float | None = 1.0) -> Sample:
    """A prompt of one token and a response of the others."""
    count = len(tokens) - 1
    return Sample(
        group_id=sample_id // 2,
        sample_id=sample_id,
        tokens=torch.tensor(tokens),
        response_length=count,
        loss_mask=torch.ones(count, dtype=torch.bool),
        rollout_log_probs=torch.full((count,), -0.5),
        reward=reward,
        weight_versions=(3,) * count,
    )


def given() -> list[Sample]:
    return [sample(0, 9, 1, 2, 3), sample(1, 9, 4, 5), sample(2, 8, 6), sample(3, 8, 7, 7)]


def data_of(samples: list[Sample]) -> Data:
    return {
        "tokens": [s.tokens.tolist() for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [0.5, -0.5, 1.5, -1.5],
        "loss_masks": [[1] * s.response_length for s in samples],
        "rollout_log_probs": [[-0.5] * s.response_length for s in samples],
    }


def read(data: Any, samples: list[Sample] | None = None) -> list[Sample]:
    return read_train_data(data, given() if samples is None else samples, NAME, vocab_size=10)


def test_what_is_not_changed_stays() -> None:
    for before, after in zip(given(), read(data_of(given())), strict=True):
        assert torch.equal(before.tokens, after.tokens) and after.loss_mask.all()
        assert torch.equal(before.rollout_log_probs, after.rollout_log_probs)  # type: ignore[arg-type]
        assert (before.weight_versions, before.reward) == (after.weight_versions, after.reward)
    assert [s.metadata[TRAIN_REWARD] for s in read(data_of(given()))] == [0.5, -0.5, 1.5, -1.5]


def test_tokens_masks_and_numbers_are_taken() -> None:
    """Tensors and arrays too; tokens that the engine did not write have no weight version."""
    data = data_of(given())
    data["tokens"][0] = torch.tensor([9, 9, 9, 1, 2, 3])
    data["response_lengths"][0] = 5
    data["loss_masks"][0] = torch.tensor([0, 0, 1, 1, 1]).numpy()
    data["rollout_log_probs"][0] = [0.0, 0.0, -1.0, -2.0, -3.0]
    data |= {"raw_reward": [5, 6, 7, 8], "truncated": [0, 1, 0, 0], "round_number": [1] * 4}
    first, second, *_ = read(data)
    assert first.weight_versions == (-1, -1, 3, 3, 3) and first.prompt_length == 1
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert (first.reward, second.reward) == (5.0, 6.0)
    assert (first.status, second.status) == (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    del data["rollout_log_probs"]
    assert all(s.rollout_log_probs is None for s in read(data))


def test_rollout_ids_say_which_sequences_are_an_episode() -> None:
    """One sample as two sequences, and two that were one episode as one."""
    samples = given()[:2]
    data = {key: [values[0], values[0], values[1]] for key, values in data_of(given()).items()}
    first, second, third = read(data | {"rollout_ids": [0, 0, 1]}, samples)
    assert [first.sample_id, second.sample_id, third.sample_id] == [0, 0, 1]
    episode = [sample(4, 9, 1, 2), sample(4, 9, 1, 2, 3), sample(5, 9, 6)]
    merged = {
        "tokens": [[9, 1, 2, 3], [9, 6]],
        "response_lengths": [3, 1],
        "rewards": [1.0, -1.0],
        "loss_masks": [[1, 1, 1], [1]],
        "sample_indices": [4, 5],
    }
    assert [s.sample_id for s in read(merged, episode)] == [4, 5]


def test_a_sample_without_a_reward_keeps_none() -> None:
    """It trains nothing, whatever the function says of it; an aborted one has no tokens there."""
    lost = sample(0, 9, reward=math.nan)
    lost = replace(lost, status=SampleStatus.ABORTED, rollout_log_probs=torch.empty(0))
    data = data_of([lost, *given()[1:]])
    data["tokens"][0] = []
    found = read(data, [lost, *given()[1:]])[0]
    assert math.isnan(found.metadata[TRAIN_REWARD]) and found.reward is not None
    assert found.tokens.tolist() == [9] and found.status == SampleStatus.ABORTED


WRONG: dict[str, tuple[Callable[[Data], object], str]] = {
    "absent": (lambda d: d.pop("loss_masks"), "the dict has no 'loss_masks'; required: tokens"),
    "unknown": (lambda d: d.update(rollout_routed_experts=[0] * 4), "has unknown 'rollout_routed_experts'; required"),
    "lengths": (lambda d: d["rewards"].pop(), "lists of different lengths: {"),
    "order": (lambda d: d.update(sample_indices=[1, 0, 2, 3]), "'sample_indices' must have every sample of the rollout"),
    "lost": (lambda d: d.update(rollout_ids=[0, 0, 2, 3]), "'rollout_ids' must have every sample of the rollout"),
    "vocabulary": (lambda d: d["tokens"][2].append(10), "entry 2, of sample 2: tokens are outside 0 to 10 - 1"),
    "text": (lambda d: d["tokens"].__setitem__(1, "abc"), "entry 1, of sample 1: tokens must be a list of integers"),
    "fractions": (lambda d: d["tokens"].__setitem__(1, [0.5, 1.0]), "tokens must be a list of integers"),
    "response": (lambda d: d["response_lengths"].__setitem__(1, 3), "response_lengths is 3 of 3 tokens, prompt included"),
    "mask": (lambda d: d["loss_masks"].__setitem__(0, [1, 1]), "loss_masks has 2 entries for 3 response tokens"),
    "weights": (lambda d: d["loss_masks"].__setitem__(0, [1, 2, 1]), "loss_masks has entries that are neither 0 nor 1"),
    "log_probs": (lambda d: d["rollout_log_probs"].__setitem__(2, [0.5]), "rollout_log_probs are not finite, or above 0"),
    "silent": (lambda d: d["rollout_log_probs"].__setitem__(2, None), "entry 2 has no rollout_log_probs, but others do"),
    "reward": (lambda d: d["rewards"].__setitem__(3, "1"), "entry 3, of sample 3: rewards is str, must be a number"),
    "nan": (lambda d: d["rewards"].__setitem__(3, math.nan), "rewards is nan, but the sample had the reward 1.0"),
    "truncated": (lambda d: d.update(truncated=[0, 0, 2, 0]), "truncated is 2, must be 0 or 1"),
    "denominator": (lambda d: d.update(rollout_mask_sums=[3, 2, 1, 9]), "rollout_mask_sums[3] is 9, must be 2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_reported(kind: str) -> None:
    change, words = WRONG[kind]
    data = data_of(given())
    change(data)
    with pytest.raises(ValueError) as caught:
        read(data)
    assert str(caught.value).startswith(NAME) and words in str(caught.value)


def test_other_results_and_siblings_that_differ_are_reported() -> None:
    with pytest.raises(ValueError, match="returned list; return a dict of lists"):
        read([])
    data = {key: values[:2] for key, values in data_of(given()).items()}
    with pytest.raises(ValueError, match="the sequences of sample 0 have the rewards"):
        read(data | {"rollout_ids": [0, 0]}, given()[:1])
    with pytest.raises(ValueError, match="2 entries for 1 samples; set 'rollout_ids'"):
        read(data, given()[:1])


def test_a_record_of_turns_stays_with_its_tokens_alone() -> None:
    """Other tokens, another place of the response or another number of sequences: no record."""
    turns = {"summed": True, "parents": [-1], "rewards": [0.5], "spans": [[[0, 3, 0]]]}
    samples = [replace(s, metadata={TURNS: turns, "x": 1}) for s in given()]

    def recorded(data: Data) -> list[bool]:
        found = read(data, samples)
        assert all(s.metadata["x"] == 1 and TRAIN_REWARD in s.metadata for s in found)
        return [TURNS in s.metadata for s in found]

    data = data_of(samples)
    data["loss_masks"][0] = [0, 0, 1]
    assert recorded(data) == [True] * 4
    data["tokens"][1][-1] = 6
    data["response_lengths"][3] = 1
    data["loss_masks"][3], data["rollout_log_probs"][3] = [1], [-0.5]
    assert recorded(data) == [True, False, True, False]
    data = {key: [values[0], *values] for key, values in data_of(samples).items()}
    assert recorded(data | {"rollout_ids": [0, 0, 1, 2, 3]}) == [False, False, True, True, True]
    found = read(data | {"rollout_ids": [0, 0, 1, 2, 3]}, samples)
    with pytest.raises(ValueError, match=r"sample 0 does not record .* --custom-convert-samples"):
        credit_fields(found[1:], by_turn=True, turn_penalty=0, token_penalty=0)


def test_tokens_keep_what_was_said_of_each() -> None:
    """A teacher's log-probs stay with the same tokens; other tokens have none."""
    taught = [replace(s, teacher_log_probs=torch.zeros(s.response_length)) for s in given()]
    assert all(s.teacher_log_probs is not None for s in read(data_of(given()), taught))
    data = data_of(given())
    data["tokens"][1][-1] = 6
    with pytest.raises(
        ValueError, match="tokens must be unchanged, since the sample has teacher_log_probs"
    ):
        read(data, taught)
