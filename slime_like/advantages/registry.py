"""Registry of advantage estimators. Outcome estimators return one number per sample, for all its
active tokens; token estimators one per token; turn estimators one per turn of an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slime_like.advantages.episodes import TurnGroup
from slime_like.lazy import Tensor
from slime_like.registry import Registry

if TYPE_CHECKING:
    from slime_like.advantages.episodes import TokenTree


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The finite rewards of one prompt's group, n >= 2."""

    rewards: Tensor  # [n] float64
    lengths: Tensor  # [n] float64, active tokens
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class RewardParts:
    """The components of the rewards of a rollout."""

    values: Tensor  # [B, K] float, not finite if a sample lacks the component
    weights: tuple[float, ...]  # K

    def __post_init__(self) -> None:
        shape = tuple(self.values.shape)
        count = len(self.weights)
        if len(shape) != 2 or shape[1] != count:
            raise ValueError(f"reward parts have shape {shape} for {count} weights, not [B, K]")


@dataclass(frozen=True, slots=True)
class OutcomeEstimator:
    """fn returns the advantages [n] of one group."""

    name: str
    fn: Callable[[GroupRewards], Tensor]
    # maps the number of all samples, and of those in groups with differing rewards, to a factor of
    # the latter's advantages
    batch_factor: Callable[[int, int], float] | None = None
    scales_by_std: bool = False  # fn uses `GroupRewards.normalize_std`
    # apply fn to each reward component; combine maps the weighted sums [B] and the valid samples
    # [B] bool to advantages [B]. None: fn is applied to the reward
    combine: Callable[[Tensor, Tensor], Tensor] | None = None
    divides_by_mean: bool = False  # for rewards >= 0 only
    over_batch: bool = False  # all samples of the rollout are one group, whatever their prompts


@dataclass(frozen=True, slots=True)
class Peers:
    """Groups with samples on several ranks. Sequences have an entry per sample of this rank."""

    group_index: Sequence[int]  # in [0, num_groups)
    num_groups: int  # of the rollout
    max_length: int  # active tokens of the rollout's longest sample
    references: Sequence[float]  # one reward of the sample's group, equal within the group
    valid: Sequence[bool]  # whether the sample's reward is finite
    all_reduce: Callable[[Tensor], Tensor]  # sums a tensor over the ranks


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Samples of a rollout on this rank. Sequences have an entry per sample."""

    outcomes: Sequence[float]  # the rewards after `TokenEstimator.outcome`
    masks: Sequence[Tensor]  # [R] bool, active tokens
    penalties: Sequence[Tensor]  # [R] float64, subtracted from token rewards; 0 at inactive tokens
    greedy_rewards: Sequence[float] | None  # of a greedy response; None: not requested
    gamma: float  # discount
    values: Sequence[Tensor] | None = None  # [R], a critic's, read at active tokens only
    lambd: float = 1.0  # of generalised advantage estimation
    value_lambd: float | None = None  # of the critic's returns; None: lambd
    lambd_length_alpha: float | None = None  # lambda by length (VAPO); None: lambd
    # [R], in place of the outcome, or None for a sample without; None: no sample has any
    token_rewards: Sequence[Tensor | None] | None = None
    # [R], squared norm of the gradient of each log-prob by the logits; None: not requested
    energies: Sequence[Tensor] | None = None
    peers: Peers | None = None  # None: not requested
    normalize_std: bool = True  # divide by the standard deviation
    tree: TokenTree | None = None  # of agents' episodes; None: every sample is one sequence


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """fn returns the advantages [R] float64 of each sample, 0 at inactive tokens."""

    name: str
    fn: Callable[[TokenRewards], list[Tensor]]
    # maps a group's rewards to one number per sample; None: the rewards themselves
    outcome: Callable[[GroupRewards], Tensor] | None = None
    whitens: bool = False  # --normalize-advantages is part of the estimator
    needs_greedy: bool = False  # requires `greedy_rewards`
    needs_values: bool = False  # requires `values`, i.e. a critic
    # computes the critic's targets, [R] float64 per sample; None: advantage plus value
    returns: Callable[[TokenRewards], list[Tensor] | None] | None = None
    needs_energies: bool = False  # requires `energies`
    needs_peers: bool = False  # requires `peers`, because it compares tokens within a group
    takes_token_rewards: bool = False  # uses per-token rewards
    scales_by_std: bool = False  # uses `normalize_std`
    discounts: bool = True  # uses `gamma`
    # a token's advantage depends on later tokens, so that `fn` uses `tree` if there is one
    follows_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TurnEstimator:
    """fn returns the advantages of the turns in one group, per episode."""

    name: str
    fn: Callable[[TurnGroup], list[list[float]]]
    discounts: bool = True  # uses `gamma`


AdvantageEstimator = OutcomeEstimator | TokenEstimator | TurnEstimator

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")
"""Every `OutcomeEstimator`, `TokenEstimator` and `TurnEstimator` by name and alias."""

OutcomeFunction = TypeVar("OutcomeFunction", bound=Callable[[GroupRewards], Tensor])
TurnFunction = TypeVar("TurnFunction", bound=Callable[[TurnGroup], list[list[float]]])
TokenFunction = TypeVar("TokenFunction", bound=Callable[[TokenRewards], list[Tensor]])


def register_outcome_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = "", **declared: Any
) -> Callable[[OutcomeFunction], OutcomeFunction]:
    """Decorator that registers ``fn(group) -> advantages [n]`` as --advantage-estimator `name`.
    declared: further fields of `OutcomeEstimator`. Raises ValueError if the name is taken."""

    def register(fn: OutcomeFunction) -> OutcomeFunction:
        advantage_estimators.add(name, OutcomeEstimator(name, fn, **declared), aliases, help=help)
        return fn

    return register


def register_token_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = "", **declared: Any
) -> Callable[[TokenFunction], TokenFunction]:
    """As `register_outcome_estimator`, for ``fn(rewards) -> advantages [R] of each sample``.
    declared: further fields of `TokenEstimator`."""

    def register(fn: TokenFunction) -> TokenFunction:
        advantage_estimators.add(name, TokenEstimator(name, fn, **declared), aliases, help=help)
        return fn

    return register


def register_turn_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = "", **declared: Any
) -> Callable[[TurnFunction], TurnFunction]:
    """As `register_outcome_estimator`, for ``fn(group) -> an advantage for each turn``. declared:
    further fields of `TurnEstimator`."""

    def register(fn: TurnFunction) -> TurnFunction:
        advantage_estimators.add(name, TurnEstimator(name, fn, **declared), aliases, help=help)
        return fn

    return register


def needs_critic(estimator: AdvantageEstimator) -> bool:
    """Whether the estimator needs a critic."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_values


def takes_token_rewards(estimator: AdvantageEstimator) -> bool:
    """Whether the estimator uses per-token rewards."""
    return isinstance(estimator, TokenEstimator) and estimator.takes_token_rewards


def compares_samples(estimator: AdvantageEstimator) -> bool:
    """Whether a sample's advantage is relative to the others of its prompt."""
    if isinstance(estimator, OutcomeEstimator):
        return not estimator.over_batch
    if isinstance(estimator, TurnEstimator):
        return True
    return estimator.outcome is not None or estimator.needs_peers


def handles_singletons(estimator: AdvantageEstimator) -> bool:
    """Whether the estimator leaves groups of one sample to --singleton-advantage."""
    if isinstance(estimator, OutcomeEstimator):
        return not estimator.over_batch
    return isinstance(estimator, TokenEstimator) and estimator.outcome is not None


def discounts(estimator: AdvantageEstimator) -> bool:
    """Whether later rewards are discounted by --gamma."""
    return not isinstance(estimator, OutcomeEstimator) and estimator.discounts


def compares_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token's advantage is relative to tokens of other samples of its prompt."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_peers


def follows_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token's advantage depends on later tokens, as in discounted returns."""
    return isinstance(estimator, TokenEstimator) and estimator.follows_tokens


def needs_energies(estimator: AdvantageEstimator) -> bool:
    """Whether the estimator uses token energies, `otb.token_energies`."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_energies
