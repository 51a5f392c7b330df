"""Health checks: warnings about a run that does not learn, or learns the wrong thing.

Every rule evaluates logged metrics over a window of rollouts, and reports the observation, its
meaning and a flag that helps. A warning is shown once; ``health/<rule>`` marks the rollouts in
which a rule fires, and ``health/warnings`` is the number of rules that fire now. Training is not
affected.

The thresholds are rules of thumb, chosen so that the runs of docs/en/algorithms/results.md that
learn are silent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_like.checkpoints.state import HealthState


WINDOW = 5  # rollouts whose mean is compared, at the start and at the end
PATIENCE = 3  # consecutive rollouts with equal rewards
FLAT = 1e-6  # rewards with a standard deviation up to this count as equal
NO_SPREAD = 0.9  # share of groups with equal rewards
TRUNCATED = 0.5  # share of truncated responses, from the start on
TRUNCATED_MORE = 0.2  # increase of that share over the first rollouts
SPECIAL = 0.3  # share of special tokens inside answers, from the start on
SPECIAL_MORE = 0.05  # increase of that share over the first rollouts
COLLAPSE = 0.25  # length relative to the first rollouts
ENTROPY_COLLAPSE = 0.1  # entropy relative to the first rollouts
IMPROVED = 0.25  # required increase of the mean reward, in standard deviations of the first rewards

REWARD = "rollout/reward_mean"
REWARD_STD = "rollout/reward_std"
SPREADLESS = "reward/zero_spread_group_frac"
SINGLE = "reward/singleton_groups"
LENGTH = "rollout/response_length_mean"
TRUNCATION = "rollout/truncated_frac"
ENTROPY = "train/entropy"
SPECIAL_TOKENS = "rollout/special_token_frac"
ACTIVE_TOKENS = "rollout/active_tokens"
WATCHED = (
    *(REWARD, REWARD_STD, SPREADLESS, SINGLE, LENGTH, TRUNCATION, ENTROPY),
    *(SPECIAL_TOKENS, ACTIVE_TOKENS),
)


class Series:
    """The first and the last WINDOW finite values of one metric."""

    def __init__(self, first: Sequence[float] = (), last: Sequence[float] = ()) -> None:
        self.first = list(first)
        self.last: deque[float] = deque(last, maxlen=WINDOW)

    def add(self, value: float) -> None:
        if math.isfinite(value):
            if len(self.first) < WINDOW:
                self.first.append(value)
            self.last.append(value)

    @property
    def full(self) -> bool:
        return len(self.first) == WINDOW

    @property
    def start(self) -> float:
        """Mean of the first values."""
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        """Mean of the last values."""
        return sum(self.last) / len(self.last)

    def newest(self, count: int) -> list[float]:
        """The last `count` values; none if there are fewer."""
        return list(self.last)[-count:] if len(self.last) >= count else []


History = Mapping[str, Series]


def _rewards_without_spread(history: History) -> Sequence[float] | None:
    """Mean rewards of the newest rollouts, if all rewards within each are the same."""
    spread = history[REWARD_STD].newest(PATIENCE)
    if not spread or max(spread) > FLAT:
        return None
    return history[REWARD].newest(PATIENCE)


def no_reward(history: History) -> str | None:
    rewards = _rewards_without_spread(history)
    if rewards is None or any(rewards):
        return None
    return (
        f"every reward of the last {PATIENCE} rollouts is 0, so nothing is learned. Read some "
        "responses (--save-debug-rollout-data): the reward may look for a form that the model "
        "never writes, --label-key may name the wrong field, --rollout-max-response-len may cut "
        "the answer, or the prompts are too hard"
    )


def constant_reward(history: History) -> str | None:
    rewards = _rewards_without_spread(history)
    if rewards is None or not any(rewards):
        return None
    return (
        f"all rewards within each of the last {PATIENCE} rollouts are the same ({rewards[-1]:.4g} "
        "at last), so nothing is learned. Either the prompts are solved (--num-rollout can be "
        "smaller, or --prompt-data harder), or the reward does not depend on the response "
        "(--custom-rm-path, --rm-type)"
    )


def no_spread(history: History) -> str | None:
    shares = history[SPREADLESS].newest(PATIENCE)
    spread = history[REWARD_STD].newest(PATIENCE)
    singles = history[SINGLE].newest(PATIENCE)
    if not shares or min(shares) < NO_SPREAD or not spread or max(spread) <= FLAT or any(singles):
        return None
    return (
        f"in {shares[-1]:.0%} of the groups all responses have the same reward, which gives an "
        "advantage of 0: prompts are too easy or too hard. --dynamic-sampling-filter-path draws "
        "others in their place, a larger --n-samples-per-prompt or --rollout-temperature finds "
        "differences, and so does a reward with partial credit"
    )


def no_tokens(history: History) -> str | None:
    if history[ACTIVE_TOKENS].newest(1) != [0.0]:
        return None
    return (
        "no token of this rollout is trained on: the optimizer steps and the schedule go on, and "
        "nothing is learned. --rollout-sample-filter-path may remove every sample, a loss mask "
        "every token, or --mask-offpolicy-in-partial-rollout all that older weights have sampled"
    )


def truncation(history: History) -> str | None:
    share = history[TRUNCATION]
    if not share.full:
        return None
    increase = share.now - share.start
    if share.now < TRUNCATED and increase < TRUNCATED_MORE:
        return None
    was = f", {share.start:.0%} at first" if increase >= TRUNCATED_MORE else ""
    return (
        f"{share.now:.0%} of the responses are cut at --rollout-max-response-len{was}. Where the "
        "reward pays for text after the answer, the policy learns never to stop: give cut or "
        "overlong responses less (--custom-rm-path), hold the policy near the first one "
        "(--use-kl-loss), or raise the limit if answers need it"
    )


def special_tokens(history: History) -> str | None:
    share = history[SPECIAL_TOKENS]
    if not share.full:
        return None
    increase = share.now - share.start
    if share.now < SPECIAL and increase < SPECIAL_MORE:
        return None
    was = f", {share.start:.1%} at first" if increase >= SPECIAL_MORE else ""
    return (
        f"{share.now:.1%} of the tokens inside answers are special tokens{was}, such as those that "
        "begin a turn. The reward may not see them (--rollout-skip-special-tokens, or a function "
        "that removes them) or not object: give such answers less (--custom-rm-path), or end them "
        "there (--rollout-stop-token-ids)"
    )


def length_collapse(history: History) -> str | None:
    length = history[LENGTH]
    if not length.full or length.now >= COLLAPSE * length.start or _improved(history):
        return None
    return (
        f"responses have {length.now:.1f} tokens where they had {length.start:.1f}, and the reward "
        "is no better. The policy gives up answering: lower --lr, hold it near the first one "
        "(--use-kl-loss), or look whether the reward or --loss-reduction favours short responses"
    )


def entropy_collapse(history: History) -> str | None:
    entropy = history[ENTROPY]
    if not entropy.full or entropy.now >= ENTROPY_COLLAPSE * entropy.start or _improved(history):
        return None
    return (
        f"the entropy fell from {entropy.start:.3g} to {entropy.now:.3g}, and the reward is no "
        "better: all responses are alike, and nothing new is tried. Lower --lr, raise "
        "--entropy-coef (0.01 to begin with), or widen --eps-clip-high"
    )


RULES: Mapping[str, Callable[[History], str | None]] = {
    "no_reward": no_reward,
    "constant_reward": constant_reward,
    "no_spread": no_spread,
    "no_tokens": no_tokens,
    "truncation": truncation,
    "special_tokens": special_tokens,
    "length_collapse": length_collapse,
    "entropy_collapse": entropy_collapse,
}
REWARD_RULES = frozenset({"no_reward", "constant_reward", "no_spread"})


def _improved(history: History) -> bool:
    """Whether the mean reward has increased since the first rollouts, by more than its
    variation."""
    reward = history[REWARD]
    spread = history[REWARD_STD]
    if not reward.full or not spread.full:
        return False
    return reward.now > reward.start + IMPROVED * spread.start


class HealthMonitor:
    """Applies the rules to every rollout.

    Args:
        reward_trains: Rewards are the training signal. False if a teacher is (on-policy
            distillation with --rm-type zero), which disables the rules about rewards.
    """

    def __init__(self, *, reward_trains: bool = True) -> None:
        self._rules = {
            name: rule for name, rule in RULES.items() if reward_trains or name not in REWARD_RULES
        }
        self._history = {name: Series() for name in WATCHED}
        self._shown: list[str] = []

    def check(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Evaluate the rules on the metrics of one rollout.

        Args:
            metrics: Logged metrics; missing or non-finite ones are ignored.

        Returns:
            The metrics ``health/warnings`` and ``health/<rule>`` (1) of the rules that fire, and
            the messages of those that fire for the first time in the run.
        """
        warnings = self.warnings(metrics)
        new = [name for name in warnings if name not in self._shown]
        self._shown += new
        health = {"health/warnings": float(len(warnings))}
        health |= {f"health/{name}": 1.0 for name in warnings}
        return health, [f"{name} (health/{name}): {warnings[name]}" for name in new]

    def warnings(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Add the metrics of one rollout; the messages of the rules that fire now."""
        for name in WATCHED:
            if name in metrics:
                self._history[name].add(metrics[name])
        return {name: text for name, rule in self._rules.items() if (text := rule(self._history))}

    def state_dict(self) -> dict[str, object]:
        """State for a checkpoint, as plain JSON."""
        series = {name: [list(s.first), list(s.last)] for name, s in self._history.items()}
        return {"series": series, "shown": list(self._shown)}

    def load_state_dict(self, state: HealthState) -> None:
        """Continue from a `state_dict`; metrics that are not in it start empty."""
        for name, (first, last) in state["series"].items():
            if name in self._history:
                self._history[name] = Series(first, last)
        self._shown = list(state["shown"])


def meanings(rows: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """What the ``health/<rule>`` of a run mean and what helps: by metric, the message of the last
    rollout in which it fired. rows: of metrics.jsonl."""
    monitor = HealthMonitor()
    found: dict[str, str] = {}
    for row in rows:
        messages = monitor.warnings(row)
        found |= {f"health/{name}": messages[name] for name in messages if f"health/{name}" in row}
    return found
