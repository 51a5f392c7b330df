"""Registry of advantage estimators. Outcome estimators give one number per sample, shared by all
its active tokens; token estimators give each token its own; turn estimators each turn of an
agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slime_like.lazy import Tensor
from slime_like.registry import Registry

if TYPE_CHECKING:
    from slime_like.advantages.tree_returns import TokenTree


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The finite rewards of one prompt's group. rewards, lengths: [n] float64, n >= 2."""

    rewards: Tensor
    lengths: Tensor  # active tokens
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What the rewards of a rollout are made of. values: [B, K] float, not finite where a sample has
    no such part; weights: K numbers."""

    values: Tensor
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.values.shape[1] != len(self.weights):
            raise ValueError(
                f"parts of rewards have shape {tuple(self.values.shape)} and {len(self.weights)} weights; "
                "they must be [B, K] and K"
            )


@dataclass(frozen=True, slots=True)
class OutcomeEstimator:
    """fn returns the advantages [n] of one group. batch_factor: function of the numbers of all
    samples and of samples in groups with differing rewards; multiplies the advantages of the
    latter. scales_by_std: fn uses `GroupRewards.normalize_std`. combine: apply fn to each reward
    component; combine maps the weighted sums [B] and the usable samples [B] bool to advantages [B].
    None: fn is applied to the reward."""

    name: str
    fn: Callable[[GroupRewards], Tensor]
    batch_factor: Callable[[int, int], float] | None = None
    scales_by_std: bool = False
    combine: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Group information for samples of one group that are on several ranks.

    groups: per sample, the index of its group, out of `count` in the rollout. longest: active
        tokens
    of the rollout's longest sample. references: per sample, one reward of its group, equal within
    the group. usable: per sample, whether its reward is finite. total: all-reduces a tensor over
    the ranks.
    """

    groups: Sequence[int]
    count: int
    longest: int
    references: Sequence[float]
    usable: Sequence[bool]
    total: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Some samples of a rollout, which may be any part of it.

    outcomes: one number by sample, what `TokenEstimator.outcome` makes of the rewards. masks: [R]
    bool by sample, active tokens. penalties: [R] float64 by sample, what the KL takes off each
    token's reward, 0 at inactive tokens. greedy_rewards: reward of a greedy response to the
    sample's prompt, by sample; None where nobody asked for it. values: [R] by sample, a critic's,
    read at active tokens only; None without a critic. gamma: discount. lambd: of generalised
    advantage estimation; value_lambd: that of the critic's returns, None: lambd;
    lambd_length_alpha: of the policy's as its sample's length has it, None: lambd. token_rewards: [R] by sample, which stand in for its outcome, or None
    where it has none; None altogether where no sample has any. energies: [R] by sample, the squared
    norm of the gradient of each token's log-prob by the logits; None where nobody asked for them.
    peers: None where nobody asked for them. normalize_std: divide by the standard deviation.
    tree: of agents' episodes; None: each sample is one sequence of tokens.
    """

    outcomes: Sequence[float]
    masks: Sequence[Tensor]
    penalties: Sequence[Tensor]
    greedy_rewards: Sequence[float] | None
    gamma: float
    values: Sequence[Tensor] | None = None
    lambd: float = 1.0
    value_lambd: float | None = None
    lambd_length_alpha: float | None = None
    token_rewards: Sequence[Tensor | None] | None = None
    energies: Sequence[Tensor] | None = None
    peers: Peers | None = None
    normalize_std: bool = True
    tree: TokenTree | None = None


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """fn returns the advantages [R] float64 of each sample, 0 at inactive tokens.

    outcome: maps a group's rewards to one number per sample; None: the rewards themselves. whitens:
    --normalize-advantages is part of the estimator. needs_greedy: requires `greedy_rewards`.
    needs_values: requires `values`, i.e. a critic. returns: computes the critic's targets, [R]
    float64 per sample; None: advantage plus value. needs_energies: requires `energies`.
    needs_peers: requires `peers`, because it compares tokens within a group. takes_token_rewards:
    uses per-token rewards. scales_by_std: uses `normalize_std`. follows_tokens: a token's advantage
    depends on later tokens, so that `fn` uses `tree` if there is one.
    """

    name: str
    fn: Callable[[TokenRewards], list[Tensor]]
    outcome: Callable[[GroupRewards], Tensor] | None = None
    whitens: bool = False
    needs_greedy: bool = False
    needs_values: bool = False
    returns: Callable[[TokenRewards], list[Tensor] | None] | None = None
    needs_energies: bool = False
    needs_peers: bool = False
    takes_token_rewards: bool = False
    scales_by_std: bool = False
    follows_tokens: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeAnswers:
    """The turns of an agent's episode. parents: index of the turn that each continues, -1 for none.
    rewards: reward of each turn. spans: per sequence of the episode, (first token in the response,
    number of tokens, turn) of each trained turn."""

    parents: Sequence[int]
    rewards: Sequence[float]
    spans: Sequence[Sequence[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The usable episodes of one prompt. rewards: of each, without turn rewards. compared: the same
    after a user's post-processing; None: to be normalised here."""

    rewards: Sequence[float]
    episodes: Sequence[EpisodeAnswers]
    compared: Sequence[float] | None
    gamma: float
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class TurnEstimator:
    """fn returns the advantages of the turns in one group, per episode."""

    name: str
    fn: Callable[[AnswerGroup], list[list[float]]]


AdvantageEstimator = OutcomeEstimator | TokenEstimator | TurnEstimator

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")
"""Every `OutcomeEstimator`, `TokenEstimator` and `TurnEstimator` by name and alias."""

OutcomeFunction = TypeVar("OutcomeFunction", bound=Callable[[GroupRewards], Tensor])
TurnFunction = TypeVar("TurnFunction", bound=Callable[[AnswerGroup], list[list[float]]])
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
    name: str, *, aliases: Iterable[str] = (), help: str = ""
) -> Callable[[TurnFunction], TurnFunction]:
    """As `register_outcome_estimator`, for ``fn(group) -> an advantage for each turn``."""

    def register(fn: TurnFunction) -> TurnFunction:
        advantage_estimators.add(name, TurnEstimator(name, fn), aliases, help=help)
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
    if isinstance(estimator, OutcomeEstimator | TurnEstimator):
        return True
    return estimator.outcome is not None or estimator.needs_peers


def compares_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token's advantage is relative to tokens of other samples of its prompt."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_peers


def follows_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token's advantage depends on later tokens, as in discounted returns."""
    return isinstance(estimator, TokenEstimator) and estimator.follows_tokens


def needs_energies(estimator: AdvantageEstimator) -> bool:
    """Whether the estimator uses token energies, `otb.token_energies`."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_energies
