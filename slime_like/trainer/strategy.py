"""Training strategies: reinforcement learning from sampled responses, or supervised fine-tuning.
They hold everything in which a trainer step differs between the two."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from arguments.run_config import RunConfig
from slime_like.distributed.collectives import from_rank_zero
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.metrics.health import HealthMonitor
from slime_like.rollout.failures import (
    LEFT_OUT_FAILED,
    check_failed,
    failed_fraction,
    first_failure,
)
from slime_like.sample_index import TRUNCATED_FRACTION, AnySample
from slime_like.trainer.batch_builder import BatchBuilder, Batches
from slime_like.trainer.sampling_factory import staleness_bound
from slime_like.types import truncated_fraction

logger = logging.getLogger(__name__)


class ReinforcementLearning:
    """Trains on sampled responses and their rewards.

    health: detects runs that do not learn. samples_responses: each rollout needs the engine with
    the current weights.
    """

    samples_responses = True

    def __init__(
        self,
        *,
        recorded: bool,
        staleness: int | None,
        source: str,
        max_failed: float,
        reward_trains: bool,
    ) -> None:
        """recorded: the rollouts come from another run and have its weight versions. staleness:
        maximum staleness in weight versions, None for unbounded. source: named in the error about
        staler tokens. max_failed: largest fraction of failed samples."""
        self.health: HealthMonitor | None = HealthMonitor(reward_trains=reward_trains)
        self._recorded = recorded
        self._staleness = staleness
        self._source = source
        self._max_failed = max_failed

    def check_samples(
        self,
        step: int,
        samples: Sequence[AnySample],
        collected: Mapping[str, float],
        weight_version: int,
    ) -> dict[str, float]:
        """Check a newly collected rollout; returns metrics. Only a user function or a faulty engine
        can violate the staleness bound. collected: metrics of the collection."""
        metrics = rollout_metrics(samples, None if self._recorded else weight_version)
        metrics = merge_metrics(metrics, collected)
        metrics["rollout/failed_frac"] = failed_fraction(samples, collected)
        if not self._recorded:
            source = f"{self._source}, rollout {step + 1}"
            check_staleness(samples, weight_version, self._staleness, source)
        return metrics

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
        self, builder: BatchBuilder, samples: Sequence[AnySample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        """The train batches of the rollout, and metrics."""
        return builder.build(samples, weight_version)


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
        self, builder: BatchBuilder, samples: Sequence[AnySample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        return builder.build_supervised(samples)


Strategy = ReinforcementLearning | SupervisedFineTuning


def make_strategy(run: RunConfig) -> Strategy:
    """The strategy of --loss-type."""
    if run.algorithm.loss_type == "sft_loss":
        return SupervisedFineTuning(run.rollout.rollout_max_response_len)
    path = run.scheduling.rollout_function_path
    return ReinforcementLearning(
        recorded=run.debug.load_debug_rollout_data is not None,
        staleness=staleness_bound(run),
        source="the engine" if path is None else f"--rollout-function-path {path}",
        max_failed=run.gates.max_failed_samples,
        reward_trains=run.reward.rm_type != "zero",
    )


def merge_metrics(metrics: dict[str, float], user_metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the metrics of a user function. Raises ValueError for a name that is taken."""
    duplicates = sorted(metrics.keys() & user_metrics.keys())
    if duplicates:
        raise ValueError(
            f"--rollout-function-path: the metric {duplicates[0]!r} is one of the run's own; give "
            "it another name"
        )
    return {**metrics, **user_metrics}


def engine_failures(metrics: Mapping[str, float]) -> str:
    """Counts of failed requests to servers, to append to a message; "" if there were none."""
    counts = [
        f"{name.removeprefix('engine/')} {value:g}"
        for name, value in metrics.items()
        if name.startswith("engine/") and value
    ]
    return f" (requests to the engines: {', '.join(counts)})" if counts else ""


def rollout_metrics(
    samples: Sequence[AnySample], weight_version: int | None = None
) -> dict[str, float]:
    """Metrics over all samples of a rollout. Non-finite rewards are excluded from mean and standard
    deviation, and counted. weight_version: version of the policy before the update, the reference
    of staleness."""
    rewards = [s.reward for s in samples if s.reward is not None and math.isfinite(s.reward)]
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.float64)
    metrics = {
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        TRUNCATED_FRACTION: truncated_fraction(samples),
        "rollout/failed_frac": failed_fraction(samples),
        "rollout/reward_nonfinite": float(len(samples) - len(rewards)),
        "rollout/tokens": float(sum(s.total_length for s in samples)),
    }
    if rewards:
        values = torch.tensor(rewards, dtype=torch.float64)
        metrics["rollout/reward_mean"] = float(values.mean())
        metrics["rollout/reward_std"] = float(values.std(correction=0))
    versions = Counter[int]()
    for sample in samples:
        versions.update(sample.version_counts)
    if versions:
        metrics["rollout/weight_version_min"] = float(min(versions))
        if weight_version is not None:
            metrics |= staleness_metrics({weight_version - v: n for v, n in versions.items()})
    return metrics


def staleness_metrics(counts: Mapping[int, int]) -> dict[str, float]:
    """Staleness of the sampled tokens in weight versions: mean, maximum, and the fraction at each
    value. counts: number of tokens by staleness."""
    total = sum(counts.values())
    metrics = {
        "rollout/staleness_mean": sum(behind * n for behind, n in counts.items()) / total,
        "rollout/staleness_max": float(max(counts)),
    }
    for behind, count in sorted(counts.items()):
        metrics[f"rollout/staleness_frac_{behind}"] = count / total
    return metrics


def check_staleness(
    samples: Sequence[AnySample], weight_version: int, bound: int | None, remedy: str
) -> None:
    """Raise RunError for tokens of a future version, or of one too far behind.

    Args:
        weight_version: Version of the policy before the update.
        bound: Maximum number of versions behind; None: unbounded.
        remedy: End of the message.
    """
    for sample in samples:
        versions = sample.version_counts
        newest = max(versions, default=weight_version)
        oldest = min(versions, default=weight_version)
        if newest > weight_version or (bound is not None and weight_version - oldest > bound):
            wrong = newest if newest > weight_version else oldest
            legal = "no bound" if bound is None else f"at most {bound} versions behind"
            raise RunError(
                f"sample {sample.sample_id} has tokens of weight version {wrong}, and the policy "
                f"being trained has version {weight_version} ({legal}): {remedy}"
            )
