"""The guard of --true-on-policy-mode: the smallest difference is named, and nothing else is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime_like.guards.finite import GuardError
from slime_like.guards.rollout import check_exact
from slime_like.types import TrainSample

OLD = torch.tensor([-0.5, -1.25, -3.0])
UP = float(torch.nextafter(torch.tensor(-1.25), torch.tensor(0.0)))


def sample(engine: Tensor | None, mask: tuple[bool, ...] = (True, True, True)) -> TrainSample:
    return TrainSample(
        torch.arange(5), 3, torch.tensor(mask), torch.ones(3), rollout_log_probs=engine
    )


def check(*samples: TrainSample) -> None:
    names = [str(10 + i) for i in range(len(samples))]
    check_exact([OLD] * len(samples), samples, names, weight_version=4)


def test_equal_bits_pass_and_masked_tokens_are_not_compared() -> None:
    other = torch.tensor([-0.5, UP, -3.0])
    check(sample(OLD.clone()), sample(other, (True, False, True)))
    check(sample(None, (False, False, False)))


def test_the_first_difference_is_named_with_both_values() -> None:
    one_bit = torch.tensor([-0.5, UP, -3.0])
    with pytest.raises(GuardError) as caught:
        check(sample(OLD), sample(one_bit), sample(OLD - 1))
    assert str(caught.value) == (
        "--true-on-policy-mode: the log-prob of token 1 of the response of sample 11 is -1.25 in "
        "the trainer and -1.24999988 in the rollout engine, with weight version 4; log-probs that "
        "differ: 4"
    )


@pytest.mark.parametrize("engine", [torch.tensor([-0.5, math.nan, -3.0]), None])
def test_numbers_that_are_none_differ(engine: Tensor | None) -> None:
    with pytest.raises(GuardError, match=r"(nan|none) in the rollout engine"):
        check(sample(engine))


def test_a_partial_mask_is_told_as_a_possible_reason() -> None:
    one_bit = torch.tensor([-0.5, UP, -3.0])
    with pytest.raises(GuardError, match="the loss mask leaves out 1 of its tokens"):
        check(sample(OLD), sample(one_bit, (True, True, False)))
