"""Compute token advantages of this rank's samples from the rewards of a rollout, with any
estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from slime_like.advantages.distillation import prefix_weights
from slime_like.advantages.kl_reward import sample_kl
from slime_like.advantages.outcome import (
    SINGLETONS,
    Singleton,
    finite_rewards,
    outcome_advantages,
    over_groups,
)
from slime_like.advantages.registry import (
    AdvantageEstimator,
    EpisodeAnswers,
    GroupRewards,
    OutcomeEstimator,
    Peers,
    RewardParts,
    TokenEstimator,
    TokenRewards,
    TurnEstimator,
    advantage_estimators,
    takes_token_rewards,
)
from slime_like.advantages.turns import credits_of_tokens
from slime_like.advantages.walk import tree_of
from slime_like.advantages.whitening import sum_over, whiten
from slime_like.config import NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg
from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.inputs import require_ids, require_samples, require_shape


@dataclass(frozen=True, slots=True)
class AdvantageSettings(CheckedSettings):
    """Settings of advantage estimation. entry: the registered estimator."""

    estimator: str
    normalize_std: bool = arg(True, "Divide by the standard deviation of the group.")
    singleton: Singleton = arg("zero", "Advantage in a group of one.", choices=SINGLETONS)
    normalize: bool = arg(False, "Whiten over all ranks.")
    gamma: float = arg(1.0, "Discount.", legal=UNIT)
    lambd: float = arg(1.0, "Of generalised advantage estimation.", legal=UNIT)
    value_lambd: float | None = arg(None, "Of the critic's returns; None: lambd.", legal=UNIT)
    lambd_length_alpha: float | None = arg(
        None, "Lambda by length in place of lambd.", legal=POSITIVE
    )
    kl_coef: float = arg(0.0, "Of the KL in the reward.", legal=NON_NEGATIVE)
    distillation_coef: float = arg(0.0, "Of the gap to the teacher.", legal=NON_NEGATIVE)
    distillation_only: bool = arg(False, "Rewards give no advantage.")
    prefix_gamma: float = arg(0.0, "Of the gap's weight by its prefix.", legal=NON_NEGATIVE)
    entry: AdvantageEstimator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", advantage_estimators.get(self.estimator))
        CheckedSettings.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """All samples of a rollout, equal on all ranks. rewards: [B] float, not finite where there is
    none; group_ids, lengths: [B] int, the prompt and the active tokens; greedy_rewards: [B] float,
    of a greedy response to the prompt, or None. processed: [B] float, what a function of the user's
    made of the rewards, in place of the comparison within groups; not finite where there is
    nothing. None without one. answers: of each episode, for estimators of turns and those that follow
    tokens, None where one has no record of them; None altogether: one answer each.
    penalties: [B] float, taken off the rewards. token_rewards: by sample, [R] finite rewards of its tokens, which
    train in place of its reward, or None where it has one for all of it, or where another rank has
    them: some_have_token_rewards then. parts: of the rewards, for an estimator that compares each on
    its own; the KL does not come off them."""

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    greedy_rewards: Tensor | None = None
    processed: Tensor | None = None
    token_rewards: Sequence[Tensor | None] = ()
    some_have_token_rewards: bool = False
    parts: RewardParts | None = None
    answers: Sequence[EpisodeAnswers | None] | None = None
    penalties: Tensor | None = None

    def __post_init__(self) -> None:
        require_ids("group_ids", self.group_ids, self.rewards.numel())
        for name in ("lengths", "greedy_rewards", "processed", "penalties"):
            if (value := getattr(self, name)) is not None:
                require_shape(name, value, self.rewards, "rewards")
        if len(self.token_rewards) not in (0, self.rewards.numel()):
            raise ValueError(
                f"token_rewards has {len(self.token_rewards)} entries for {self.rewards.numel()} rewards"
            )

    @property
    def has_token_rewards(self) -> bool:
        given = any(value is not None for value in self.token_rewards)
        return given or self.some_have_token_rewards


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of this rank's samples. values: [R] float32 per sample, 0 at inactive tokens.
    metrics: plain numbers by name, equal on all ranks. returns: targets of the critic, if any, [R]
    float32 per sample: not whitened, 0 at inactive tokens, NaN for samples without a usable
    reward."""

    values: list[Tensor]
    metrics: Mapping[str, float]
    returns: list[Tensor] | None = None


def estimate_advantages(
    settings: AdvantageSettings,
    outcomes: Outcomes,
    *,
    mine: Sequence[int],
    masks: Sequence[Tensor],
    sequences: Sequence[int] | None = None,
    kl: Sequence[Tensor] | None = None,
    teacher_gap: Sequence[Tensor] | None = None,
    critic_values: Sequence[Tensor] | None = None,
    energies: Sequence[Tensor] | None = None,
    given: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenAdvantages:
    """Compute advantages of this rank's samples. The KL penalty is subtracted from the reward: per
    sample before normalisation within groups, or per token for per-token estimators. Samples with
    non-finite numbers are excluded from all statistics, including whitening, and get advantage 0.

    Args:
        settings: The estimator and its settings.
        outcomes: All samples of the rollout, equal on all ranks.
        mine: Indices of this rank's samples.
        masks: [R] bool per sample of this rank, active tokens.
        sequences: Index of this rank's samples within their episodes; None: episodes have one
            sequence.
        kl: [R] by sample of this rank (`kl_reward.token_kl`), or None.
        teacher_gap: [R] per sample of this rank (`distillation.teacher_gaps`), or None; subtracted
            from the advantages, scaled, before whitening.
        critic_values: [R] by sample of this rank, before the update, or None.
        energies: [R] by sample of this rank (`otb.token_energies`), or None.
        given: advantages and returns, [R] by sample of this rank, in place of the estimator's.
        group: Data-parallel ranks (collective); None: this process.

    Returns:
        Advantages per sample of this rank, metrics, and with a critic the returns.

    Raises:
        ValueError: An unknown estimator, a missing input, a wrong number of samples or shape, token
            rewards with an estimator that does not use them, or no finite reward.
    """
    require_samples(masks, mine=mine, kl=kl, teacher_gap=teacher_gap, critic_values=critic_values)
    require_samples(masks, energies=energies)
    entry = settings.entry
    if given is None:
        _require_token_rewards_taken(entry, outcomes)
    rewards, penalised, metrics = _penalised(settings, outcomes, kl, mine, group)
    targets: Sequence[Tensor] | None = None
    found: Mapping[str, float]
    if given is not None:
        values, found, targets = [value.double() for value in given[0]], {}, given[1]
    elif isinstance(entry, OutcomeEstimator):
        values, found = _by_sample(entry, settings, outcomes, penalised, mine, masks)
    elif outcomes.parts is not None:
        raise ValueError(f"{entry.name} takes one reward a response, and parts were given")
    elif isinstance(entry, TurnEstimator):
        found = over_groups(_itself, penalised, outcomes.group_ids, outcomes.lengths).metrics
        values = credits_of_tokens(
            entry,
            penalised,
            outcomes.group_ids,
            outcomes.answers,  # each has its record, see `credit_fields`
            compared=outcomes.processed is not None,
            gamma=settings.gamma,
            normalize_std=settings.normalize_std,
            mine=mine,
            sequences=sequences,
            masks=masks,
        )
    else:
        usable = torch.where(torch.isfinite(penalised), rewards, float("nan"))
        batch, numbers, found = _token_rewards(
            entry, settings, outcomes, usable, mine, masks, kl, critic_values
        )
        if entry.needs_energies:
            batch = replace(batch, energies=energies)
        if entry.follows_tokens and outcomes.answers is not None:
            tree = tree_of(outcomes, numbers, mine, sequences, group)
            batch = replace(batch, tree=tree)
        if entry.needs_peers:
            batch = replace(batch, peers=_peers(usable, outcomes, mine, group))
        values = entry.fn(batch)
        targets = None if entry.returns is None else entry.returns(batch)
    metrics |= found
    sound = _sound(penalised, outcomes, entry)
    returns = None
    if critic_values is not None:
        targets = targets or [a + v.double() for a, v in zip(values, critic_values)]
        known = [bool(sound[i]) for i in mine]
        returns = [_returns(*of_one) for of_one in zip(targets, masks, known)]
    if settings.distillation_only:
        values = [torch.zeros_like(value) for value in values]
    if teacher_gap is not None:
        coef, gaps = settings.distillation_coef, list(teacher_gap)
        if settings.prefix_gamma:
            weights = prefix_weights(gaps, masks, settings.prefix_gamma)
            gaps = [weight * gap for weight, gap in zip(weights, gaps)]
        values = [value - coef * gap for value, gap in zip(values, gaps)]
        total_gap = sample_kl(teacher_gap, mine, rewards.numel(), group)
        sound = sound & torch.isfinite(total_gap)
        metrics["rollout/opd_reverse_kl"] = _per_token(total_gap, outcomes)
        metrics["rollout/opd_nonfinite"] = float((~torch.isfinite(total_gap)).sum())
    trained = [mask & bool(sound[i]) for i, mask in zip(mine, masks)]
    if settings.normalize:
        values = whiten(values, trained, group)
    final = [torch.where(mask, value, 0.0).float() for value, mask in zip(values, trained)]
    return TokenAdvantages(final, metrics, returns)


def _penalised(
    settings: AdvantageSettings,
    outcomes: Outcomes,
    kl: Sequence[Tensor] | None,
    mine: Sequence[int],
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rewards [B] float64, and less the KL of the whole sample; metrics. Where a function of the
    user's has made something of the rewards, both are that."""
    rewards, metrics = outcomes.rewards.double(), {}
    if outcomes.penalties is not None:
        rewards = rewards - outcomes.penalties
    total_kl = torch.zeros_like(rewards)
    if kl is not None:
        total_kl = sample_kl(kl, mine, rewards.numel(), group)
        metrics["rollout/kl_in_reward"] = _per_token(total_kl, outcomes)
    penalised = rewards - settings.kl_coef * total_kl
    if outcomes.processed is None:
        return rewards, penalised, metrics
    processed = torch.where(torch.isfinite(penalised), outcomes.processed.double(), float("nan"))
    return processed, processed, metrics


def _per_token(totals: Tensor, outcomes: Outcomes) -> float:
    """The mean over tokens of finite sums over samples [B]."""
    finite = torch.isfinite(totals)
    return float(totals[finite].sum()) / max(int(outcomes.lengths[finite].sum()), 1)


def _by_sample(
    entry: OutcomeEstimator,
    settings: AdvantageSettings,
    outcomes: Outcomes,
    penalised: Tensor,
    mine: Sequence[int],
    masks: Sequence[Tensor],
) -> tuple[list[Tensor], Mapping[str, float]]:
    """One number for all tokens of a sample. penalised: [B], not finite where there is none."""
    if outcomes.processed is not None:
        finite = finite_rewards(penalised)
        values = [
            torch.where(mask & bool(finite[i]), penalised[i], 0.0) for i, mask in zip(mine, masks)
        ]
        return values, {"reward/nonfinite": float((~finite).sum())}
    output = outcome_advantages(
        entry,
        rewards=penalised,
        group_ids=outcomes.group_ids,
        lengths=outcomes.lengths,
        normalize_std=settings.normalize_std,
        singleton=settings.singleton,
        parts=outcomes.parts,
    )
    values = [torch.where(mask, output.values[i].double(), 0.0) for i, mask in zip(mine, masks)]
    return values, output.metrics


def _require_token_rewards_taken(entry: AdvantageEstimator, outcomes: Outcomes) -> None:
    """Raises ValueError where there are rewards of tokens that would be dropped."""
    if not outcomes.has_token_rewards:
        return
    remedy = "return one number for the response, or add --sum-token-rewards to train on their sum"
    if not takes_token_rewards(entry):
        takers = [n for n, e in advantage_estimators.items() if takes_token_rewards(e)]
        raise ValueError(
            f"--advantage-estimator {entry.name} takes one reward a response, and the reward function gave one for each token; "
            f"{remedy}; {' and '.join(takers)} take rewards of tokens"
        )
    if outcomes.processed is not None:
        raise ValueError(
            "--custom-reward-post-process-path and --custom-convert-samples-to-train-data-path give one reward a response, and the reward "
            "function gave one for each token; " + remedy
        )


def _returns(targets: Tensor, mask: Tensor, known: bool) -> Tensor:
    """[R] float32 at active tokens, NaN there where the sample's rewards are not known."""
    return torch.where(mask, targets if known else float("nan"), 0.0).float()


def _sound(penalised: Tensor, outcomes: Outcomes, entry: AdvantageEstimator) -> Tensor:
    """[B] bool: samples that have all numbers that their advantage is made of."""
    sound = torch.isfinite(penalised)
    if (
        isinstance(entry, TokenEstimator)
        and entry.needs_greedy
        and outcomes.greedy_rewards is not None
    ):
        sound = sound & torch.isfinite(outcomes.greedy_rewards)
    return sound


def _itself(group: GroupRewards) -> Tensor:
    return group.rewards


def _peers(
    rewards: Tensor, outcomes: Outcomes, mine: Sequence[int], group: dist.ProcessGroup | None
) -> Peers:
    """rewards: [B], NaN where a sample cannot be used."""
    ids, place = outcomes.group_ids.unique(return_inverse=True)
    usable = torch.isfinite(rewards)
    references = [0.0] * ids.numel()
    for i in usable.nonzero().flatten().tolist():
        references[place[i]] = float(rewards[i])
    return Peers(
        groups=[int(place[i]) for i in mine],
        count=ids.numel(),
        longest=int(outcomes.lengths.max()),
        references=[references[place[i]] for i in mine],
        usable=[bool(usable[i]) for i in mine],
        total=partial(sum_over, group=group),
    )


def _token_rewards(
    entry: TokenEstimator,
    settings: AdvantageSettings,
    outcomes: Outcomes,
    rewards: Tensor,
    mine: Sequence[int],
    masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None,
    critic_values: Sequence[Tensor] | None,
) -> tuple[TokenRewards, Tensor, Mapping[str, float]]:
    """What an estimator of tokens gets, the outcomes [B] of all samples, and metrics. rewards: [B],
    NaN where a sample cannot be used."""
    if entry.outcome is None or outcomes.processed is not None:
        finite = finite_rewards(rewards)
        numbers: Tensor = torch.where(finite, rewards, 0.0)
        metrics = {"reward/nonfinite": float((~finite).sum())}
    else:
        output = over_groups(
            entry.outcome,
            rewards,
            outcomes.group_ids,
            outcomes.lengths,
            singleton=settings.singleton,
        )
        numbers, metrics = output.values, dict(output.metrics)
    if entry.needs_peers:  # of the groups that it compares by itself
        metrics = dict(over_groups(_itself, rewards, outcomes.group_ids, outcomes.lengths).metrics)
    if entry.needs_greedy and outcomes.greedy_rewards is not None:
        broken = ~torch.isfinite(outcomes.greedy_rewards)
        metrics["reward/greedy_nonfinite"] = float(broken.sum())
    zero = [torch.zeros(mask.numel(), dtype=torch.float64) for mask in masks]
    given = [outcomes.token_rewards[i] for i in mine] if outcomes.has_token_rewards else None
    batch = TokenRewards(
        outcomes=[float(numbers[i]) for i in mine],
        masks=masks,
        penalties=zero if kl is None else [settings.kl_coef * value for value in kl],
        greedy_rewards=None
        if outcomes.greedy_rewards is None
        else [float(outcomes.greedy_rewards[i]) for i in mine],
        gamma=settings.gamma,
        values=critic_values,
        lambd=settings.lambd,
        value_lambd=settings.value_lambd,
        lambd_length_alpha=settings.lambd_length_alpha,
        token_rewards=given,
        normalize_std=settings.normalize_std,
    )
    return batch, numbers, metrics
