"""Token weights against the definitions as nested means."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slime_like.losses import LOSS_REDUCTIONS, reduction_weights

LENGTHS = [3, 0, 5, 1, 2, 4]
ROLLOUTS = [10, 10, 7, 7, 3, 99]
PROMPTS = [1, 1, 1, 0, 0, 5]
NORM = 8
MICRO = 2


def weights(
    kind: str,
    lengths: Sequence[int] = LENGTHS,
    rollouts: Sequence[int] = ROLLOUTS,
    prompts: Sequence[int] = PROMPTS,
) -> list[float]:
    u = reduction_weights(
        kind,
        active_tokens=torch.tensor(lengths),
        rollout_ids=torch.tensor(rollouts),
        prompt_ids=torch.tensor(prompts),
        loss_norm_length=NORM,
        micro_batch_size=MICRO,
    )
    assert u.dtype == torch.float64
    return u.tolist()


def token_losses(lengths: Sequence[int]) -> list[list[float]]:
    return [[float((i + 2) ** 2 + j) for j in range(n)] for i, n in enumerate(lengths)]


def mean_over_groups(losses: list[list[float]], ids: Sequence[int]) -> float:
    """Mean over groups of the mean over all tokens of the group; an empty group counts as 0."""
    means = []
    for group in sorted(set(ids)):
        tokens = [x for sample, i in zip(losses, ids) if i == group for x in sample]
        means.append(sum(tokens) / len(tokens) if tokens else 0.0)
    return sum(means) / len(means)


def reduced(
    kind: str, losses: list[list[float]], rollouts: Sequence[int], prompts: Sequence[int]
) -> float:
    tokens = [x for sample in losses for x in sample]
    if kind == "rollout_mean":
        return mean_over_groups(losses, rollouts)
    if kind == "prompt_mean":
        return mean_over_groups(losses, prompts)
    if kind == "sequence_mean":
        return mean_over_groups(losses, range(len(losses)))
    if kind == "token_mean":
        return sum(tokens) / len(tokens)
    if kind == "token_mean_legacy":
        return mean_over_groups(losses, [i // MICRO for i in range(len(losses))])
    assert kind == "seq_mean_token_sum_norm"
    return sum(sum(sample) / NORM for sample in losses) / len(losses)


@pytest.mark.parametrize("kind", LOSS_REDUCTIONS)
def test_weighted_sum_is_the_nested_mean(kind: str) -> None:
    losses = token_losses(LENGTHS)
    total = sum(u * sum(sample) for u, sample in zip(weights(kind), losses))
    assert total == pytest.approx(reduced(kind, losses, ROLLOUTS, PROMPTS), rel=1e-14)


@pytest.mark.parametrize("kind", [kind for kind in LOSS_REDUCTIONS if kind != "token_mean_legacy"])
def test_weights_do_not_depend_on_the_order_of_samples(kind: str) -> None:
    order = [4, 2, 0, 5, 3, 1]
    shuffled = weights(
        kind, *([column[i] for i in order] for column in (LENGTHS, ROLLOUTS, PROMPTS))
    )
    assert shuffled == pytest.approx([weights(kind)[i] for i in order], rel=1e-15)


def test_rollout_mean_of_whole_rollouts_is_sequence_mean() -> None:
    assert weights("rollout_mean", rollouts=[5, 4, 3, 2, 1, 0]) == weights("sequence_mean")


def test_siblings_share_their_rollouts_tokens() -> None:
    """Rollout 7 was cut into samples of 5 and 1 tokens: each weighs 1 / (4 rollouts * 6 tokens)."""
    assert weights("rollout_mean")[2:4] == pytest.approx([1 / 24, 1 / 24])


def test_a_fully_masked_row_counts_as_a_sequence() -> None:
    """Trap: dropping it from B inflates the others. Its own weight is finite and unused."""
    assert weights("sequence_mean", lengths=[2, 0], rollouts=[0, 1], prompts=[0, 1]) == [
        1 / 4,
        1 / 2,
    ]
    assert weights("prompt_mean", lengths=[2, 0], rollouts=[0, 1], prompts=[0, 1]) == [1 / 4, 1 / 2]


@pytest.mark.parametrize("kind", LOSS_REDUCTIONS)
def test_a_step_without_active_tokens_has_finite_weights(kind: str) -> None:
    assert all(0 < u <= 1 for u in weights(kind, lengths=[0] * 6))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rollout_mean", "rollout_ids"),
        ("prompt_mean", "prompt_ids"),
        ("seq_mean_token_sum_norm", "--loss-norm-length"),
        ("token_mean_legacy", "use token_mean"),
        (
            "token_sum",
            "rollout_mean, sequence_mean, token_mean, seq_mean_token_sum_norm, prompt_mean, "
            "token_mean_legacy",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduction_weights(kind, active_tokens=torch.tensor([1, 2]))


@pytest.mark.parametrize("length", [0, -5])
def test_a_norm_length_below_one_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"--loss-norm-length >= 1 \(given: {length}\)"):
        reduction_weights(
            "seq_mean_token_sum_norm", active_tokens=torch.tensor([1, 2]), loss_norm_length=length
        )


def test_the_legacy_mean_depends_on_the_micro_batches() -> None:
    """The exception: 1 / (K N_k), with N_k the tokens of micro-batch k. Within a micro-batch the
    order does not matter."""
    lengths = torch.tensor([3, 0, 5, 1])
    by_size = {
        size: reduction_weights(
            "token_mean_legacy", active_tokens=lengths, micro_batch_size=size
        ).tolist()
        for size in (1, 2, 4)
    }
    assert by_size[1] == pytest.approx([1 / 12, 1 / 4, 1 / 20, 1 / 4])
    assert by_size[2] == pytest.approx([1 / 6, 1 / 6, 1 / 12, 1 / 12])
    assert by_size[4] == reduction_weights("token_mean", active_tokens=lengths).tolist()
    with pytest.raises(ValueError, match="divides the 4 samples"):
        reduction_weights("token_mean_legacy", active_tokens=lengths, micro_batch_size=3)
