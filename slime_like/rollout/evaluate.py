"""Scores on evaluation sets: the mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch.distributed as dist

from arguments.eval_sets import EvalSet
from arguments.prompt_mix import MixSource
from arguments.schema import RewardConfig, RolloutConfig
from slime_like.engines.base import SamplingParams
from slime_like.function_args import NO_SETTINGS, FunctionArgs
from slime_like.rewards.grader import Grader
from slime_like.rollout.failures import warn_failed
from slime_like.rollout.rollouter import Rollouter, eval_sampling
from slime_like.samples.episodes import truncated_fraction
from slime_like.samples.exchange import all_sequences
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.standard_sets import standard_sets
from slime_like.types import Prompt


def reward_of(
    eval_set: EvalSet | MixSource, reward: RewardConfig, key: str | None = None
) -> RewardConfig | None:
    """The reward of an evaluation set, or of a source of a mix, which takes precedence over the
    run's reward function; None: the run's. key: --eval-reward-key."""
    names_one = bool(eval_set.rm_type or eval_set.custom_rm_path)
    if key is not None:
        reward = replace(reward, reward_key=key)
    if not names_one:
        return None if key is None else reward
    if isinstance(eval_set, EvalSet) and eval_set.set is not None:
        needed = standard_sets.get(eval_set.set).rm_timeout_s
        reward = replace(reward, rm_timeout_s=max(reward.rm_timeout_s, needed))
    path = eval_set.custom_rm_path
    rm_type = None if path is not None else eval_set.rm_type
    return replace(reward, rm_type=rm_type, custom_rm_path=path, group_rm=False)


class Evaluator:
    """The evaluation sets of a run, each with its own sampling and perhaps its own reward function.

    Args:
        prompts: By set name.
        reward: The run's; a set that names a reward gets a separate grader.
        reward_key: --eval-reward-key.
        settings: Of the run, for reward functions.
    """

    def __init__(
        self,
        rollouter: Rollouter,
        sets: Sequence[EvalSet],
        prompts: Mapping[str, Sequence[Prompt]],
        rollout: RolloutConfig,
        reward: RewardConfig,
        reward_key: str | None = None,
        settings: FunctionArgs = NO_SETTINGS,
    ) -> None:
        self.sets = sets
        self.prompts = prompts
        self._rollouter = rollouter
        self._rollout = rollout
        self.last: dict[str, list[SampleGroup]] = {}  # of the last evaluation, by set
        rewards = {eval_set.name: reward_of(eval_set, reward, reward_key) for eval_set in sets}
        self._graders = {
            name: Grader(**asdict(config), settings=settings)
            for name, config in rewards.items()
            if config is not None
        }

    def sampling(self, eval_set: EvalSet) -> SamplingParams:
        return eval_sampling(eval_set, self._rollout)

    def grader(self, name: str) -> Grader | None:
        """The grader of a set; None: the run's."""
        return self._graders.get(name)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Scores of every set under the engine's current weights, by metric name."""
        metrics: dict[str, float] = {}
        self._rollouter.rollout_id = rollout_id
        for eval_set in self.sets:
            groups = self._rollouter.generate(
                self.prompts[eval_set.name],
                eval_set.n_samples_per_eval_prompt,
                self.sampling(eval_set),
                purpose=f"eval/{eval_set.name}",
                grader=self.grader(eval_set.name),
            )
            what = f"evaluation {rollout_id + 1}, {eval_set.name}"
            warn_failed(flatten(groups), what, "count as 0", self._rollouter.group)
            metrics |= score(eval_set.name, groups, self._rollouter.group)
            self.last[eval_set.name] = groups
        return metrics

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()


def score(
    name: str, groups: Sequence[SampleGroup], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """eval/<name>/mean, pass@k for k = 1, 2, 4, ... up to the group size, and of all sequences of
    the episodes the response length and the fraction that is truncated. Collective if an episode
    has several.

    A sample passes if its reward is at least 1. A sample without a finite reward (e.g. a failed
    grader) counts as 0, so that the score covers all prompts.
    """
    samples = flatten(groups)
    metrics = score_rewards(name, [s.reward for s in samples])
    sequences = all_sequences(samples, group)
    total_length = sum(s.response_length for s in sequences)
    metrics[f"eval/{name}/response_length_mean"] = total_length / len(sequences)
    metrics[f"eval/{name}/truncated_frac"] = truncated_fraction(sequences)
    passes = [sum(_value(s.reward) >= 1 for s in g.samples) for g in groups]
    sizes = [len(g.samples) for g in groups]
    k = 1
    while k <= min(sizes):
        per_group = [pass_at_k(n, c, k) for n, c in zip(sizes, passes)]
        metrics[f"eval/{name}/pass@{k}"] = sum(per_group) / len(per_group)
        k *= 2
    return metrics


def score_rewards(
    name: str, rewards: Sequence[float | None], truncated: Sequence[bool] | None = None
) -> dict[str, float]:
    """The part of `score` that needs no samples. truncated: None where it is not known."""
    num_unscored = sum(r is None or not math.isfinite(r) for r in rewards)
    metrics = {
        f"eval/{name}/mean": sum(map(_value, rewards)) / len(rewards),
        f"eval/{name}/unscored_frac": num_unscored / len(rewards),
    }
    if truncated is not None:
        metrics[f"eval/{name}/truncated_frac"] = sum(truncated) / len(truncated)
    return metrics


def _value(reward: float | None) -> float:
    return reward if reward is not None and math.isfinite(reward) else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples passes, from c passes
    among n (arXiv 2107.03374, equation 1)."""
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
