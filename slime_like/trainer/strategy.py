"""What a run learns from: responses that it samples and grades, or given answers. One object answers
everything in which the two differ in a step of the trainer, numbers about a rollout among it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from arguments.run_config import RunConfig
from slime_like.distributed.collectives import from_rank_zero, gather
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.metrics.health import HealthMonitor
from slime_like.sample_index import TRUNCATED_FRACTION, AnySample, truncated_fraction
from slime_like.trainer.batch_builder import Batches, BatchMaker
from slime_like.trainer.rollout_manager import staleness_bound
from slime_like.types import Sample, SampleStatus

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


def is_failed(sample: AnySample) -> bool:
    """No response, or no finite reward."""
    lost = sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED)
    return lost or sample.reward is None or not math.isfinite(sample.reward)


def failed_fraction(samples: Sequence[AnySample]) -> float:
    """Share of samples without a response or a valid reward."""
    return sum(map(is_failed, samples)) / len(samples)


def first_failure(samples: Sequence[AnySample]) -> str:
    """A message about the first failed sample, on all ranks from the one that has it; a
    collective."""
    sample = next(s for s in samples if is_failed(s))
    texts = gather(_failure(sample) if isinstance(sample, Sample) else None)
    return next(words for words in texts if words is not None)


def _failure(sample: Sample) -> str:
    if sample.status == SampleStatus.ABORTED:
        return f"sample {sample.sample_id}: the engine gave it up" + (
            f": {why}" if (why := sample.metadata.get("failure")) else ""
        )
    return f"sample {sample.sample_id}: {sample.metadata.get('failure', f'its reward is {sample.reward}')}"


def engine_troubles(metrics: Mapping[str, float]) -> str:
    """What became of requests to servers, for the end of a message; nothing where all went well."""
    counts = [
        f"{name.removeprefix('engine/')} {value:g}"
        for name, value in metrics.items()
        if name.startswith("engine/") and value
    ]
    return f" (requests to the engines: {', '.join(counts)})" if counts else ""


def rollout_metrics(
    samples: Sequence[AnySample], weight_version: int | None = None
) -> dict[str, float]:
    """Over all samples of a rollout; rewards that are not finite are left out of mean and
    deviation, and counted. weight_version: of the policy that is about to be trained, from which
    staleness counts."""
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
    """How many weight versions the tokens that were sampled are behind the policy that trains on
    them: mean, largest, and the share of each. counts: tokens by versions behind."""
    total = sum(counts.values())
    metrics = {
        "rollout/staleness_mean": sum(behind * n for behind, n in counts.items()) / total,
        "rollout/staleness_max": float(max(counts)),
    }
    return metrics | {
        f"rollout/staleness_frac_{behind}": count / total
        for behind, count in sorted(counts.items())
    }


def check_staleness(
    samples: Sequence[AnySample], weight_version: int, bound: int | None, remedy: str
) -> None:
    """Raises RunError for tokens of a version that no policy has had yet, and for older ones than
    `bound` versions behind `weight_version`, the policy that is about to be trained; None: no
    bound."""
    for sample in samples:
        versions = sample.version_counts
        newest, oldest = (
            max(versions, default=weight_version),
            min(versions, default=weight_version),
        )
        if newest > weight_version or (bound is not None and weight_version - oldest > bound):
            wrong = newest if newest > weight_version else oldest
            legal = "no bound" if bound is None else f"at most {bound} versions behind"
            raise RunError(
                f"sample {sample.sample_id} has tokens of weight version {wrong}, and the policy that is "
                f"trained has version {weight_version} ({legal}): {remedy}"
            )
