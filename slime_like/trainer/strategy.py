"""Training strategies: reinforcement learning from sampled responses, or supervised fine-tuning.
They hold everything in which a trainer step differs between the two."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from slime_like.batching.builder import BatchBuilder, Batches
from slime_like.batching.outcomes import check_rewards
from slime_like.distributed.collectives import from_rank_zero
from slime_like.logs import warn_rank_0
from slime_like.metrics.health import HealthMonitor
from slime_like.metrics.names import TRUNCATED_FRACTION
from slime_like.rollout.failures import (
    LEFT_OUT_FAILED,
    check_failed,
    failed_fraction,
    first_failure,
)
from slime_like.rollout.metrics import (
    check_staleness,
    engine_failures,
    merge_metrics,
    rollout_metrics,
)
from slime_like.samples.index import AnySample

logger = logging.getLogger(__name__)


class ReinforcementLearning:
    """Trains on sampled responses and their rewards."""

    samples_responses = True  # each rollout needs the engine with the current weights

    def __init__(
        self,
        *,
        recorded: bool,
        staleness: int | None,
        source: str,
        max_failed: float,
        max_abs_reward: float,
        reward_trains: bool,
        divides_by_mean: bool = False,
    ) -> None:
        """
        Args:
            recorded: The rollouts come from another run and have its weight versions.
            staleness: Maximum staleness in weight versions, None for unbounded.
            source: Named in the error about staler tokens.
            max_failed: Largest fraction of failed samples.
            max_abs_reward: Largest magnitude of a reward.
            divides_by_mean: The advantages are for rewards >= 0.
        """
        self._for_positive = divides_by_mean
        # detects runs that do not learn
        self.health: HealthMonitor | None = HealthMonitor(reward_trains=reward_trains)
        self._recorded = recorded
        self._staleness = staleness
        self._source = source
        self._max_failed = max_failed
        self._max_abs_reward = max_abs_reward

    def check_samples(
        self,
        step: int,
        samples: Sequence[AnySample],
        collected: Mapping[str, float],
        weight_version: int,
        sequences: Sequence[AnySample] | None = None,
    ) -> dict[str, float]:
        """Check a newly collected rollout; returns metrics. Only a user function or a faulty engine
        can violate the staleness bound.

        Args:
            collected: Metrics of the collection.
            sequences: The samples with their branches; None: no sample has any.
        """
        check_rewards(samples, self._max_abs_reward)
        self._warn_of_negative_rewards(samples)
        version = None if self._recorded else weight_version
        metrics = rollout_metrics(samples, version, sequences=sequences)
        metrics = merge_metrics(metrics, collected)
        metrics["rollout/failed_frac"] = failed_fraction(samples, collected)
        if "agent/return_mean" in collected:  # what is learned is in the turns
            metrics["rollout/reward_mean"] = collected["agent/return_mean"]
            metrics["rollout/reward_std"] = collected["agent/return_std"]
        if not self._recorded:
            source = f"{self._source}, rollout {step + 1}"
            check_staleness(samples, weight_version, self._staleness, source)
        return metrics

    def _warn_of_negative_rewards(self, samples: Sequence[AnySample]) -> None:
        """Warn once about rewards for which the estimator is not meant."""
        negative = sum(s.reward is not None and s.reward < 0 for s in samples)
        if not (self._for_positive and negative):
            return
        self._for_positive = False
        warn_rank_0(
            logger,
            f"{negative} of {len(samples)} rewards are negative, and the advantage estimator "
            "divides by the mean reward of a group: groups with a mean of at most 0 have no "
            "advantage, and those just above 0 a large one; use rewards of 0 and 1, or "
            "--advantage-estimator grpo",
        )

    def check_failures(
        self, step: int, samples: Sequence[AnySample], metrics: Mapping[str, float]
    ) -> None:
        """Raise RunError if too many samples to train on failed; the collector counts those that it
        leaves out. metrics: of the rollout so far."""
        fraction = failed_fraction(samples)
        if fraction <= self._max_failed and metrics.get(LEFT_OUT_FAILED):
            return  # the collector has warned, about all samples

        def reason() -> str:
            first = first_failure(samples)
            if fraction <= self._max_failed:
                return first
            # only rank 0 has the counts, but every rank raises
            return first + from_rank_zero(lambda: engine_failures(metrics))

        check_failed(step, fraction, self._max_failed, reason)

    def build_batches(
        self,
        builder: BatchBuilder,
        step: int,
        samples: Sequence[AnySample],
        weight_version: int,
    ) -> tuple[Batches, dict[str, float]]:
        """The train batches of the rollout, and metrics."""
        return builder.build(samples, weight_version, rollout_id=step)


class SupervisedFineTuning:
    """As `ReinforcementLearning`, for the labels of the prompts as responses."""

    health: HealthMonitor | None = None
    samples_responses = False

    def __init__(self, max_response_len: int) -> None:
        self._limit = max_response_len
        self._warned = False

    def check_samples(
        self,
        step: int,
        samples: Sequence[AnySample],
        collected: Mapping[str, float],
        weight_version: int,
        sequences: Sequence[AnySample] | None = None,
    ) -> dict[str, float]:
        """Warns once per run about truncated answers: the model would not learn to end them."""
        share = collected[TRUNCATED_FRACTION]
        if share and not self._warned:
            self._warned = True
            warn_rank_0(
                logger,
                f"{share:.1%} of the answers of this step are longer than "
                f"--rollout-max-response-len {self._limit} and are truncated, without an end "
                f"token; {TRUNCATED_FRACTION} has the fraction of every step",
            )
        return dict(collected)

    def check_failures(
        self, step: int, samples: Sequence[AnySample], metrics: Mapping[str, float]
    ) -> None:
        """Nothing to check: given answers cannot fail."""

    def build_batches(
        self,
        builder: BatchBuilder,
        step: int,
        samples: Sequence[AnySample],
        weight_version: int,
    ) -> tuple[Batches, dict[str, float]]:
        return builder.build_supervised(samples)


Strategy = ReinforcementLearning | SupervisedFineTuning
