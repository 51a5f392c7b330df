"""Token advantages of this rank's samples from the rewards of a rollout, with any estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slime_like.advantages.distillation import prefix_weights
from slime_like.advantages.episodes import EpisodeTurns, TokenTree
from slime_like.advantages.kl_reward import sample_kl
from slime_like.advantages.outcome import (
    SINGLETONS,
    Singleton,
    apply_to_groups,
    finite_rewards,
    group_metrics,
    outcome_advantages,
)
from slime_like.advantages.registry import (
    AdvantageEstimator,
    OutcomeEstimator,
    Peers,
    RewardParts,
    TokenEstimator,
    TokenRewards,
    advantage_estimators,
    takes_token_rewards,
)
from slime_like.advantages.turns import turn_advantages
from slime_like.advantages.whitening import all_reduce, whiten
from slime_like.config import NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg
from slime_like.lazy import Tensor, dist, torch
from slime_like.validation import require_ids, require_samples, require_shape


@dataclass(frozen=True, slots=True)
class AdvantageSettings(CheckedSettings):
    """Settings of advantage estimation."""

    estimator: str
    normalize_std: bool = arg(True, "Divide by the standard deviation of the group.")
    singleton: Singleton = arg("zero", "Advantage in a group of one.", choices=SINGLETONS)
    normalize: bool = arg(False, "Whiten over all ranks.")
    gamma: float = arg(1.0, "Discount.", legal=UNIT)
    lambd: float = arg(1.0, "GAE lambda.", legal=UNIT)
    value_lambd: float | None = arg(
        None, "GAE lambda of the critic's returns; None: lambd.", legal=UNIT
    )
    lambd_length_alpha: float | None = arg(
        None, "VAPO's alpha: lambda by response length; None: lambd.", legal=POSITIVE
    )
    kl_coef: float = arg(0.0, "Coefficient of the KL in the reward.", legal=NON_NEGATIVE)
    distillation_coef: float = arg(0.0, "Coefficient of the teacher gap.", legal=NON_NEGATIVE)
    distillation_only: bool = arg(False, "Ignore rewards.")
    prefix_gamma: float = arg(0.0, "Prefix weight of the teacher gap.", legal=NON_NEGATIVE)

    def __post_init__(self) -> None:
        advantage_estimators.get(self.estimator)  # ValueError for an unknown one
        CheckedSettings.__post_init__(self)

    @property
    def entry(self) -> AdvantageEstimator:
        """The registered estimator."""
        return advantage_estimators.get(self.estimator)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rewards of all B samples of a rollout, equal on all ranks. An agent's episode is one sample,
    whatever the number of its sequences."""

    rewards: Tensor  # [B] float, not finite without a reward
    group_ids: Tensor  # [B] int, the prompt
    lengths: Tensor  # [B] int, active tokens
    greedy_rewards: Tensor | None = None  # [B] float, of a greedy response to the prompt (ReMax)
    # [B] float, post-processed by a user function, which replaces the comparison within groups
    processed: Tensor | None = None
    # [R] per sample, finite, in place of its reward; None: the sample has none, or it is on another
    # rank (`some_have_token_rewards`)
    token_rewards: Sequence[Tensor | None] = ()
    some_have_token_rewards: bool = False
    parts: RewardParts | None = None  # reward components (gdpo), without the KL penalty
    # turns of each episode, None if it did not record them; None: every episode is one turn
    turns: Sequence[EpisodeTurns | None] | None = None
    penalties: Tensor | None = None  # [B] float, subtracted from the rewards

    def __post_init__(self) -> None:
        require_ids("group_ids", self.group_ids, self.rewards.numel())
        for name in ("lengths", "greedy_rewards", "processed", "penalties"):
            if (value := getattr(self, name)) is not None:
                require_shape(name, value, self.rewards, "rewards")
        entries = len(self.token_rewards)
        count = self.rewards.numel()
        if entries not in (0, count):
            raise ValueError(f"token_rewards has {entries} entries for {count} rewards")

    @property
    def has_token_rewards(self) -> bool:
        return self.some_have_token_rewards or any(r is not None for r in self.token_rewards)


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of this rank's samples, and metrics that are equal on all ranks."""

    values: list[Tensor]  # [R] float32 per sample, 0 at inactive tokens
    metrics: Mapping[str, float]
    # targets of the critic, [R] float32 per sample: not whitened, 0 at inactive tokens, NaN for
    # samples without a valid reward
    returns: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The arguments of `estimate_advantages` that estimators need."""

    settings: AdvantageSettings
    outcomes: Outcomes
    indices: Sequence[int]
    masks: Sequence[Tensor]
    sequences: Sequence[int]
    kl: Sequence[Tensor] | None
    critic_values: Sequence[Tensor] | None
    energies: Sequence[Tensor] | None
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class _Estimate:
    values: list[Tensor]  # [R] float64 per sample
    metrics: Mapping[str, float]
    returns: Sequence[Tensor] | None = None  # targets of the critic; None: values + critic values


def estimate_advantages(
    settings: AdvantageSettings,
    outcomes: Outcomes,
    *,
    local_indices: Sequence[int],
    masks: Sequence[Tensor],
    sequences: Sequence[int] | None = None,
    kl: Sequence[Tensor] | None = None,
    teacher_gap: Sequence[Tensor] | None = None,
    critic_values: Sequence[Tensor] | None = None,
    energies: Sequence[Tensor] | None = None,
    precomputed: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenAdvantages:
    """Compute advantages of this rank's samples. The KL penalty is subtracted from the reward: per
    sample before normalisation within groups, or per token for per-token estimators. Samples with
    non-finite numbers are excluded from all statistics, including whitening, and get advantage 0.

    Args:
        settings: The estimator and its settings.
        outcomes: All samples of the rollout, equal on all ranks.
        local_indices: Indices of this rank's samples; the lists below have [R] for each of them.
        masks: Bool, active tokens.
        sequences: Index of each sample within its episode; None: one sequence per episode.
        kl, energies: `kl_reward.token_kl` and `otb.token_energies`, or None.
        teacher_gap: `distillation.teacher_gaps`, or None; subtracted, scaled, before whitening.
        critic_values: Before the update, or None.
        precomputed: (advantages, returns) in place of the estimator's.
        group: Data-parallel ranks (collective); None: this process.

    Returns:
        Advantages of this rank's samples, metrics, and with a critic its targets.

    Raises:
        ValueError: A missing input, a wrong number of samples or shape, token rewards with an
            estimator that does not use them, or no finite reward.
    """
    require_samples(masks, local_indices=local_indices, kl=kl, teacher_gap=teacher_gap)
    require_samples(masks, critic_values=critic_values, energies=energies)
    sequences = sequences or [0] * len(masks)
    inputs = _Inputs(
        settings, outcomes, local_indices, masks, sequences, kl, critic_values, energies, group
    )
    rewards, metrics = _subtract_kl(inputs)
    estimate = _estimate(inputs, rewards, precomputed)
    metrics |= estimate.metrics
    valid = _valid_samples(inputs, rewards)
    returns = None if critic_values is None else _critic_targets(inputs, estimate, valid)
    values = estimate.values
    if settings.distillation_only:
        values = [torch.zeros_like(value) for value in values]
    if teacher_gap is not None:
        values, finite_gap = _subtract_teacher_gap(inputs, values, teacher_gap, metrics)
        valid = valid & finite_gap
    trained = [mask & bool(valid[i]) for i, mask in zip(local_indices, masks)]
    if settings.normalize:
        values = whiten(values, trained, group)
    final = [torch.where(mask, value, 0.0).float() for value, mask in zip(values, trained)]
    return TokenAdvantages(final, metrics, returns)


def _check_token_rewards(entry: AdvantageEstimator, outcomes: Outcomes) -> None:
    """Raise ValueError if per-token rewards would be dropped."""
    if not outcomes.has_token_rewards:
        return
    remedy = "return one number for the response, or add --sum-token-rewards to train on their sum"
    if not takes_token_rewards(entry):
        others = [n for n, e in advantage_estimators.items() if takes_token_rewards(e)]
        raise ValueError(
            f"--advantage-estimator {entry.name} takes one reward per response, and the reward "
            f"function returned one per token; {remedy}; {' and '.join(others)} use token rewards"
        )
    if outcomes.processed is not None:
        raise ValueError(
            "--custom-reward-post-process-path and --custom-convert-samples-to-train-data-path "
            f"take one reward per response, the reward function returned token rewards; {remedy}"
        )


def _subtract_kl(inputs: _Inputs) -> tuple[Tensor, dict[str, float]]:
    """Rewards for the estimator, [B] float64, not finite for invalid samples; and metrics. The KL
    is subtracted per sample, except for per-token estimators and post-processed rewards."""
    outcomes = inputs.outcomes
    rewards = inputs.outcomes.rewards.double()
    metrics = {}
    if outcomes.penalties is not None:
        rewards = rewards - outcomes.penalties
    total_kl = torch.zeros_like(rewards)
    if inputs.kl is not None:
        total_kl = sample_kl(inputs.kl, inputs.indices, rewards.numel(), inputs.group)
        metrics["rollout/kl_in_reward"] = _mean_per_token(total_kl, outcomes)
    penalised = rewards - inputs.settings.kl_coef * total_kl
    if outcomes.processed is not None:
        rewards = outcomes.processed.double()
    elif not isinstance(inputs.settings.entry, TokenEstimator):
        return penalised, metrics
    return torch.where(torch.isfinite(penalised), rewards, float("nan")), metrics


def _mean_per_token(totals: Tensor, outcomes: Outcomes) -> float:
    """Mean over the tokens of samples with a finite total [B]."""
    finite = torch.isfinite(totals)
    return float(totals[finite].sum()) / max(int(outcomes.lengths[finite].sum()), 1)


def _estimate(
    inputs: _Inputs,
    rewards: Tensor,
    precomputed: tuple[Sequence[Tensor], Sequence[Tensor]] | None,
) -> _Estimate:
    if precomputed is not None:
        return _Estimate([value.double() for value in precomputed[0]], {}, precomputed[1])
    outcomes = inputs.outcomes
    entry = inputs.settings.entry
    _check_token_rewards(entry, outcomes)
    if isinstance(entry, OutcomeEstimator):
        return _outcome_estimate(entry, inputs, rewards)
    if outcomes.parts is not None:
        raise ValueError(f"{entry.name} takes one reward per response, not reward components")
    if isinstance(entry, TokenEstimator):
        return _token_estimate(entry, inputs, rewards)
    metrics = group_metrics(rewards, outcomes.group_ids, outcomes.lengths)
    values = turn_advantages(
        entry,
        rewards,
        outcomes.group_ids,
        outcomes.turns,  # every episode has its record, see `credit_fields`
        is_normalized=outcomes.processed is not None,
        gamma=inputs.settings.gamma,
        normalize_std=inputs.settings.normalize_std,
        local_indices=inputs.indices,
        sequences=inputs.sequences,
        masks=inputs.masks,
    )
    return _Estimate(values, metrics)


def _outcome_estimate(entry: OutcomeEstimator, inputs: _Inputs, rewards: Tensor) -> _Estimate:
    """One advantage per sample, on all its active tokens."""
    outcomes = inputs.outcomes
    settings = inputs.settings
    if outcomes.processed is not None:
        finite = finite_rewards(rewards)
        values = torch.where(finite, rewards, 0.0)
        metrics: Mapping[str, float] = {"reward/nonfinite": float((~finite).sum())}
    else:
        output = outcome_advantages(
            entry,
            rewards=rewards,
            group_ids=outcomes.group_ids,
            lengths=outcomes.lengths,
            normalize_std=settings.normalize_std,
            singleton=settings.singleton,
            parts=outcomes.parts,
        )
        values = output.values.double()
        metrics = output.metrics
    per_token = [torch.where(mask, values[i], 0.0) for i, mask in zip(inputs.indices, inputs.masks)]
    return _Estimate(per_token, metrics)


def _token_estimate(entry: TokenEstimator, inputs: _Inputs, rewards: Tensor) -> _Estimate:
    """One advantage per token."""
    outcomes = inputs.outcomes
    settings = inputs.settings
    group_ids = outcomes.group_ids
    lengths = outcomes.lengths
    greedy = outcomes.greedy_rewards
    if entry.outcome is None or outcomes.processed is not None:
        finite = finite_rewards(rewards)
        numbers = torch.where(finite, rewards, 0.0)
        metrics: Mapping[str, float] = {"reward/nonfinite": float((~finite).sum())}
    else:
        output = apply_to_groups(
            entry.outcome, rewards, group_ids, lengths, singleton=settings.singleton
        )
        numbers = output.values
        metrics = output.metrics
    if entry.needs_peers:  # it compares within groups by itself
        metrics = group_metrics(rewards, group_ids, lengths)
    if entry.needs_greedy and greedy is not None:
        metrics = {**metrics, "reward/greedy_nonfinite": float((~torch.isfinite(greedy)).sum())}
    batch = _token_batch(inputs, numbers)
    if entry.needs_energies:
        batch = replace(batch, energies=inputs.energies)
    if entry.follows_tokens and outcomes.turns is not None:
        batch = replace(batch, tree=_token_tree(inputs, numbers))
    if entry.needs_peers:
        batch = replace(batch, peers=_peers(inputs, rewards))
    values = entry.fn(batch)
    return _Estimate(values, metrics, None if entry.returns is None else entry.returns(batch))


def _token_batch(inputs: _Inputs, numbers: Tensor) -> TokenRewards:
    """The estimator's view of this rank's samples. numbers: [B], outcome of each sample."""
    outcomes = inputs.outcomes
    settings = inputs.settings
    indices = inputs.indices
    penalties = [torch.zeros(mask.numel(), dtype=torch.float64) for mask in inputs.masks]
    if inputs.kl is not None:
        penalties = [settings.kl_coef * value for value in inputs.kl]
    greedy = outcomes.greedy_rewards
    token_rewards = None
    if outcomes.has_token_rewards:
        token_rewards = [outcomes.token_rewards[i] for i in indices]
    return TokenRewards(
        outcomes=[float(numbers[i]) for i in indices],
        masks=inputs.masks,
        penalties=penalties,
        greedy_rewards=None if greedy is None else [float(greedy[i]) for i in indices],
        gamma=settings.gamma,
        values=inputs.critic_values,
        lambd=settings.lambd,
        value_lambd=settings.value_lambd,
        lambd_length_alpha=settings.lambd_length_alpha,
        token_rewards=token_rewards,
        normalize_std=settings.normalize_std,
    )


def _token_tree(inputs: _Inputs, numbers: Tensor) -> TokenTree:
    """The turns of this rank's episodes. numbers: [B], outcome of each episode."""
    outcomes = inputs.outcomes
    turns = inputs.outcomes.turns or ()
    if outcomes.processed is not None:  # of entire episodes, in place of the rewards of turns
        turns = [t and replace(t, rewards=[0.0] * len(t.rewards)) for t in turns]
    outcome = numbers.tolist()
    lengths = outcomes.lengths.tolist()
    return TokenTree(turns, outcome, lengths, inputs.indices, inputs.sequences, inputs.group)


def _peers(inputs: _Inputs, rewards: Tensor) -> Peers:
    ids, group_index = inputs.outcomes.group_ids.unique(return_inverse=True)
    valid = torch.isfinite(rewards)
    references = [0.0] * ids.numel()
    for i in valid.nonzero().flatten().tolist():
        references[group_index[i]] = float(rewards[i])
    return Peers(
        group_index=[int(group_index[i]) for i in inputs.indices],
        num_groups=ids.numel(),
        max_length=int(inputs.outcomes.lengths.max()),
        references=[references[group_index[i]] for i in inputs.indices],
        valid=[bool(valid[i]) for i in inputs.indices],
        all_reduce=partial(all_reduce, group=inputs.group),
    )


def _valid_samples(inputs: _Inputs, rewards: Tensor) -> Tensor:
    """[B] bool: samples with every number that the estimator needs."""
    valid = torch.isfinite(rewards)
    entry = inputs.settings.entry
    greedy = inputs.outcomes.greedy_rewards
    if isinstance(entry, TokenEstimator) and entry.needs_greedy and greedy is not None:
        valid = valid & torch.isfinite(greedy)
    return valid


def _critic_targets(inputs: _Inputs, estimate: _Estimate, valid: Tensor) -> list[Tensor]:
    """[R] float32 per sample, NaN at the active tokens of invalid samples."""
    assert inputs.critic_values is not None
    pairs = zip(estimate.values, inputs.critic_values)
    targets = estimate.returns or [advantage + value.double() for advantage, value in pairs]
    result = []
    for i, target, mask in zip(inputs.indices, targets, inputs.masks):
        value = target if valid[i] else float("nan")
        result.append(torch.where(mask, value, 0.0).float())
    return result


def _subtract_teacher_gap(
    inputs: _Inputs, values: list[Tensor], gaps: Sequence[Tensor], metrics: dict[str, float]
) -> tuple[list[Tensor], Tensor]:
    """Advantages minus the scaled gap to the teacher, and whether each sample's gap is finite [B]
    bool. Collective; adds to metrics."""
    settings = inputs.settings
    outcomes = inputs.outcomes
    total = sample_kl(gaps, inputs.indices, outcomes.rewards.numel(), inputs.group)
    finite = torch.isfinite(total)
    metrics["rollout/opd_reverse_kl"] = _mean_per_token(total, outcomes)
    metrics["rollout/opd_nonfinite"] = float((~finite).sum())
    if settings.prefix_gamma:
        weights = prefix_weights(gaps, inputs.masks, settings.prefix_gamma)
        gaps = [weight * gap for weight, gap in zip(weights, gaps)]
    return [v - settings.distillation_coef * gap for v, gap in zip(values, gaps)], finite
