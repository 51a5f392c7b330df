"""What a run learns from: responses that it samples and grades, or given answers. One object answers
everything in which the two differ in a step of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from arguments.run_config import RunConfig
from slime_like.distributed.collectives import from_rank_zero
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.metrics.health import HealthMonitor
from slime_like.rollout.metrics import (
    TRUNCATED_FRACTION,
    check_staleness,
    engine_troubles,
    failed_fraction,
    first_failure,
    rollout_metrics,
)
from slime_like.sample_index import AnySample
from slime_like.trainer.batch_builder import Batches, BatchMaker
from slime_like.trainer.rollout_manager import staleness_bound

logger = logging.getLogger(__name__)


class Strategy(Protocol):
    """health: watches for a run that learns nothing; None where nothing says so. samples_responses:
    whether each rollout needs the engine, with the current weights."""

    health: HealthMonitor | None
    samples_responses: bool

    def check_samples(
        self,
        step: int,
        samples: Sequence[AnySample],
        collected: Mapping[str, float],
        weight_version: int,
    ) -> dict[str, float]:
        """Metrics of a rollout that has just been collected; `collected` says how."""
        ...

    def check_failures(
        self, step: int, samples: Sequence[AnySample], metrics: Mapping[str, float]
    ) -> None:
        """Raises RunError where too many samples are of no use. metrics: of the rollout so far."""
        ...

    def make_batches(
        self, maker: BatchMaker, samples: Sequence[AnySample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        """What the rollout is trained on, and metrics."""
        ...


class ReinforcementLearning:
    """Responses of the policy and their rewards."""

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
        """recorded: rollouts are those of another run, under its weight versions. staleness: most
        versions that tokens may be behind, None for any number. source: who is to blame for older
        ones. max_failed: share of samples that may be of no use."""
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
        """Staleness holds by itself, unless a function of the user's brings older samples or an
        engine lies."""
        metrics = rollout_metrics(samples, None if self._recorded else weight_version)
        metrics = merged(metrics, collected)
        if not self._recorded:
            source = f"{self._source}, rollout {step + 1}"
            check_staleness(samples, weight_version, self._staleness, source)
        return metrics

    def check_failures(
        self, step: int, samples: Sequence[AnySample], metrics: Mapping[str, float]
    ) -> None:
        failed = failed_fraction(samples)
        if not failed:
            return
        text = f"rollout {step + 1}: {failed:.1%} of the samples have no usable response or reward"
        first = first_failure(samples)
        if failed > self._max_failed:
            # rank 0 alone has the counts, and any rank may be the one that raises
            troubles = from_rank_zero(lambda: engine_troubles(metrics))
            raise RunError(
                f"{text}, more than --max-failed-samples {self._max_failed:g}; the first: "
                f"{first}{troubles}"
            )
        warn_rank_0(logger, f"{text}; the first: {first}")

    def make_batches(
        self, maker: BatchMaker, samples: Sequence[AnySample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        return maker.make(samples, weight_version)


class SupervisedFineTuning:
    """The labels of the prompts, as answers to learn."""

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
        """Warns once in a run of answers that are cut: the model would not learn how they end."""
        share = collected[TRUNCATED_FRACTION]
        if share and not self._warned:
            self._warned = True
            warn_rank_0(
                logger,
                f"{share:.1%} of the answers of this step are longer than "
                f"--rollout-max-response-len {self._limit} and are cut there, without an end; "
                f"{TRUNCATED_FRACTION} has the share of every step",
            )
        return dict(collected)

    def check_failures(
        self, step: int, samples: Sequence[AnySample], metrics: Mapping[str, float]
    ) -> None:
        """An answer cannot fail."""

    def make_batches(
        self, maker: BatchMaker, samples: Sequence[AnySample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        return maker.make_supervised(samples)


def make_strategy(run: RunConfig) -> Strategy:
    """Of --loss-type."""
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


def merged(ours: dict[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Raises ValueError for a name that is there twice, as a user's function may choose it."""
    twice = sorted(ours.keys() & theirs.keys())
    if twice:
        raise ValueError(
            f"--rollout-function-path: the metric {twice[0]!r} is one of the run's own; give it another name"
        )
    return {**ours, **theirs}
