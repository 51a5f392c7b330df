"""Discounted returns and generalised advantage estimation from token rewards.

Only active tokens are states: tool output and padding are skipped without a reset, so that a reward
after a tool's output reaches earlier tokens. All samples of a rank are processed together, backward
over their active tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, torch
from slime_like.validation import require_samples


def token_rewards(
    outcomes: Sequence[float],
    masks: Sequence[Tensor],
    penalties: Sequence[Tensor],
    per_token: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Token rewards: minus the penalty at every active token, plus the outcome at the last one, or
    plus the per-token rewards.

    Args:
        outcomes: One number per sample.
        masks: [R] bool per sample.
        penalties: [R] per sample, read at active tokens only.
        per_token: [R] per sample, finite, or None to use its outcome; None: the outcome of all.
            A reward at an inactive token stays there; see `discounted_returns`.

    Returns:
        [R] float64 per sample.

    Raises:
        ValueError: A wrong number of samples or a wrong shape.
    """
    per_token = per_token or [None] * len(masks)
    require_samples(masks, outcomes=outcomes, penalties=penalties, per_token=per_token)
    rewards = []
    for outcome, mask, penalty, of_tokens in zip(outcomes, masks, penalties, per_token):
        reward = torch.where(mask, -penalty.double(), 0.0)
        if of_tokens is not None:
            reward += of_tokens.double()
        elif mask.any():
            reward[mask.nonzero()[-1]] += outcome
        rewards.append(reward)
    return rewards


def discounted_returns(
    rewards: Sequence[Tensor], masks: Sequence[Tensor], gamma: float
) -> list[Tensor]:
    """G_t = R_t + gamma G_next over active tokens; 0 at the others.

    Args:
        rewards: [R] per sample; one at an inactive token is added to the active token before it,
            and ignored if there is none or if it is not finite.
        masks: [R] bool per sample.
        gamma: Discount, 0 to 1.

    Returns:
        [R] float64 per sample.

    Raises:
        ValueError: A wrong number of samples, a wrong shape, or a discount outside [0, 1].
    """
    require_samples(masks, rewards=rewards)
    _require_unit(gamma=gamma)
    dense = _to_active(rewards, masks)
    total = torch.zeros(dense.shape[0], dtype=torch.float64)
    result = torch.zeros_like(dense)
    for t in reversed(range(dense.shape[1])):
        total = dense[:, t] + gamma * total
        result[:, t] = total
    return _from_active(result, masks)


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    gamma: float,
    lambd: float | Sequence[float],
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimation, Schulman et al., arXiv 1506.02438, equation 16, not
    whitened.

        delta_t = R_t + gamma V_next - V_t
        A_t = delta_t + gamma lambda A_next,    return_t = A_t + V_t

    Beyond the last active token V and A are 0.

    Args:
        rewards: [R] per sample, as of `discounted_returns`.
        values: [R] per sample, a critic's, read at active tokens only.
        masks: [R] bool per sample.
        gamma, lambd: 0 to 1; lambd for all samples, or one per sample.

    Returns:
        (advantages, returns), [R] float64 per sample each, 0 at inactive tokens.

    Raises:
        ValueError: A wrong number of samples, a wrong shape, or a number outside [0, 1].
    """
    require_samples(masks, rewards=rewards, values=values)
    lambds = [lambd] * len(masks) if isinstance(lambd, int | float) else lambd
    require_samples(masks, lambd=lambds)
    _require_unit(gamma=gamma)
    for number in lambds:
        _require_unit(lambd=number)
    decay = gamma * torch.tensor(lambds, dtype=torch.float64)
    dense = _to_active(rewards, masks)
    baseline = _to_active([torch.where(m, v, 0.0) for v, m in zip(values, masks)], masks)
    advantage = next_value = torch.zeros(dense.shape[0], dtype=torch.float64)
    result = torch.zeros_like(dense)
    for t in reversed(range(dense.shape[1])):
        delta = dense[:, t] + gamma * next_value - baseline[:, t]
        advantage = delta + decay * advantage
        next_value = baseline[:, t]
        result[:, t] = advantage
    return _from_active(result, masks), _from_active(result + baseline, masks)


def _require_unit(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:  # NaN too
            raise ValueError(f"{name} is {number}; it must be 0 <= x <= 1")


def _to_active(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """[B, most active tokens] float64: each sample's active tokens from the left, padded with 0. A
    finite value at an inactive token is added to the active token before it."""
    width = max((int(mask.sum()) for mask in masks), default=0)
    dense = torch.zeros(len(masks), width, dtype=torch.float64)
    for row, value, mask in zip(dense, values, masks):
        position = mask.cumsum(0) - 1
        used = (position >= 0) & (mask | torch.isfinite(value))
        row.index_add_(0, position[used], value.double()[used])
    return dense


def _from_active(dense: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `_to_active`: [R] per sample, 0 at inactive tokens."""
    return [scatter_active(row[: int(mask.sum())], mask) for row, mask in zip(dense, masks)]


def scatter_active(values: Tensor, mask: Tensor) -> Tensor:
    """values [active tokens] at the active tokens of mask [R], 0 elsewhere: [R] float64."""
    result = torch.zeros(mask.numel(), dtype=torch.float64)
    result[mask] = values
    return result
