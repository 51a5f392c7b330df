"""The table of advantage estimators. There are two kinds, and neither stands in for the other: one
gives a number for each sample, which all its active tokens share; the other gives each token its
own."""

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
    """fn gives the advantages [n] of one group. batch_factor: of a rollout's samples and of those
    in groups with different rewards, what multiplies the advantages of the latter. scales_by_std:
    whether fn reads `GroupRewards.normalize_std`. combine: fn is of each part of the reward, and this
    makes the advantages [B] of a rollout of their weighted sums [B]; it gets the usable samples [B]
    bool too. None: fn is of the reward."""

    name: str
    fn: Callable[[GroupRewards], Tensor]
    batch_factor: Callable[[int, int], float] | None = None
    scales_by_std: bool = False
    combine: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """How samples of one group find each other where they are on several ranks.

    groups: by sample, its group's place among all of the rollout, of which there are `count`.
    longest: active tokens of the rollout's longest sample. references: by sample, one reward of its
    group, equal for all of it. usable: by sample, whether it has a finite reward. total: sums a
    tensor over the ranks, which call it together.
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
    """fn gives the advantages [R] float64 of each sample, 0 at inactive tokens.

    outcome: makes the samples' numbers of a group's rewards; None: they are the rewards themselves,
    and groups do not matter. whitens:
    --normalize-advantages is part of the estimator. needs_greedy: whether `greedy_rewards` must be
    there. needs_values: whether `values`
    must be, and with them a critic. returns: what it learns, [R] float64 by sample, where that is
    not the advantage plus the value; None: it always is. needs_energies: whether `energies` must be
    there. needs_peers: whether `peers` must be, as it compares the tokens of a group.
    takes_token_rewards: whether `fn` uses rewards of tokens. scales_by_std: whether it reads
    `normalize_std`. follows_tokens: a token's number has what came after it, so that `fn` walks over
    `tree` where there is one.
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
    """The answers of an agent's episode. parents: of each, the answer before it in the list that it
    continues, -1 for none. rewards: what each got by itself. spans: by sequence of the episode, each
    answer that is trained in it: its first token in the response, its tokens, and which it is."""

    parents: Sequence[int]
    rewards: Sequence[float]
    spans: Sequence[Sequence[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The usable episodes of one prompt's group. rewards: of each, less its answers' own. compared:
    what a function of the user's made of these; None: they are to be compared."""

    rewards: Sequence[float]
    episodes: Sequence[EpisodeAnswers]
    compared: Sequence[float] | None
    gamma: float
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class TurnEstimator:
    """fn gives the advantages of one group's answers, by episode."""

    name: str
    fn: Callable[[AnswerGroup], list[list[float]]]


AdvantageEstimator = OutcomeEstimator | TokenEstimator | TurnEstimator

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")
"""Every `OutcomeEstimator`, `TokenEstimator` and `TurnEstimator`, by its name or an alias."""

OutcomeFunction = TypeVar("OutcomeFunction", bound=Callable[[GroupRewards], Tensor])
TurnFunction = TypeVar("TurnFunction", bound=Callable[[AnswerGroup], list[list[float]]])
TokenFunction = TypeVar("TokenFunction", bound=Callable[[TokenRewards], list[Tensor]])


def register_outcome_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = "", **declared: Any
) -> Callable[[OutcomeFunction], OutcomeFunction]:
    """Decorator that makes ``fn(group) -> advantages [n]`` the estimator of --advantage-estimator
    `name`. declared: further fields of `OutcomeEstimator`. Raises ValueError when the name is
    taken."""

    def register(fn: OutcomeFunction) -> OutcomeFunction:
        advantage_estimators.add(name, OutcomeEstimator(name, fn, **declared), aliases, help=help)
        return fn

    return register


def register_token_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = "", **declared: Any
) -> Callable[[TokenFunction], TokenFunction]:
    """As `register_outcome_estimator`, of ``fn(rewards) -> advantages [R] of each sample``.
    declared: further fields of `TokenEstimator`."""

    def register(fn: TokenFunction) -> TokenFunction:
        advantage_estimators.add(name, TokenEstimator(name, fn, **declared), aliases, help=help)
        return fn

    return register


def register_turn_estimator(
    name: str, *, aliases: Iterable[str] = (), help: str = ""
) -> Callable[[TurnFunction], TurnFunction]:
    """As `register_outcome_estimator`, of ``fn(group) -> an advantage for each answer``."""

    def register(fn: TurnFunction) -> TurnFunction:
        advantage_estimators.add(name, TurnEstimator(name, fn), aliases, help=help)
        return fn

    return register


def needs_critic(estimator: AdvantageEstimator) -> bool:
    """Whether a value model has to be there."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_values


def takes_token_rewards(estimator: AdvantageEstimator) -> bool:
    """Whether it uses a reward of each token, where there are such."""
    return isinstance(estimator, TokenEstimator) and estimator.takes_token_rewards


def compares_samples(estimator: AdvantageEstimator) -> bool:
    """Whether a sample is measured against the others of its prompt."""
    if isinstance(estimator, OutcomeEstimator | TurnEstimator):
        return True
    return estimator.outcome is not None or estimator.needs_peers


def compares_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token is measured against those of the others of its prompt."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_peers


def follows_tokens(estimator: AdvantageEstimator) -> bool:
    """Whether a token's advantage has what came after it, as in returns with a discount or a KL."""
    return isinstance(estimator, TokenEstimator) and estimator.follows_tokens


def needs_energies(estimator: AdvantageEstimator) -> bool:
    """Whether it uses the energy of each token, `otb.token_energies`."""
    return isinstance(estimator, TokenEstimator) and estimator.needs_energies
